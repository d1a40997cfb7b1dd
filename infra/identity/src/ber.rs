//! BER to DER: IMDS streams its PKCS #7 messages with lengths that are not known beforehand and strings in pieces, and
//! readers of such messages take the one canonical form only.

/// Deeper than any message of this kind.
const DEEPEST: usize = 16;
const CONSTRUCTED: u8 = 0x20;
const OCTET_STRING: u8 = 0x04;
const INDEFINITE: u8 = 0x80;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("at byte {at}: {what}")]
pub struct BerError {
    at: usize,
    what: &'static str,
}

/// One value, and nothing after it, with lengths that are definite and minimal and octet strings in one piece.
pub(crate) fn to_der(bytes: &[u8]) -> Result<Vec<u8>, BerError> {
    let mut reader = Reader { bytes, at: 0, end: bytes.len() };
    let mut out = Vec::with_capacity(bytes.len());
    reader.value(&mut out, DEEPEST)?;
    if reader.at != bytes.len() { reader.fail("more after its end") } else { Ok(out) }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Of the value that is being read; a definite length bounds what is in it.
    end: usize,
}

enum Length {
    Definite(usize),
    Indefinite,
}

impl Reader<'_> {
    fn fail<T>(&self, what: &'static str) -> Result<T, BerError> {
        Err(BerError { at: self.at, what })
    }

    fn byte(&mut self) -> Result<u8, BerError> {
        if self.at >= self.end {
            return self.fail("it ends too early");
        }
        self.at += 1;
        Ok(self.bytes[self.at - 1])
    }

    fn length(&mut self) -> Result<Length, BerError> {
        let first = self.byte()?;
        if first == INDEFINITE {
            return Ok(Length::Indefinite);
        }
        let mut length = usize::from(first & 0x7f);
        if first > INDEFINITE {
            let count = length;
            if count > 4 {
                return self.fail("a length of more than four bytes");
            }
            length = 0;
            for _ in 0..count {
                length = length << 8 | usize::from(self.byte()?);
            }
        }
        if length > self.end - self.at {
            return self.fail("a value that is longer than what it is in");
        }
        Ok(Length::Definite(length))
    }

    fn value(&mut self, out: &mut Vec<u8>, depth: usize) -> Result<(), BerError> {
        let tag = self.byte()?;
        if tag & 0x1f == 0x1f {
            return self.fail("a tag of more than one byte");
        }
        let mut content = Vec::new();
        let tag = match (self.length()?, tag & CONSTRUCTED != 0) {
            (Length::Definite(length), false) => {
                content.extend_from_slice(&self.bytes[self.at..self.at + length]);
                self.at += length;
                tag
            }
            (Length::Indefinite, false) => return self.fail("a plain value without a length"),
            (length, true) => {
                let pieces = tag == OCTET_STRING | CONSTRUCTED;
                self.children(&length, pieces, &mut content, depth)?;
                if pieces { OCTET_STRING } else { tag }
            }
        };
        put(out, tag, &content);
        Ok(())
    }

    /// What is in a constructed value; of an octet string's pieces, only what they hold.
    fn children(&mut self, length: &Length, pieces: bool, out: &mut Vec<u8>, depth: usize) -> Result<(), BerError> {
        let Some(depth) = depth.checked_sub(1) else { return self.fail("values in values too deep") };
        let outer = self.end;
        if let Length::Definite(length) = length {
            self.end = self.at + length;
        }
        loop {
            match length {
                Length::Definite(_) if self.at == self.end => break,
                Length::Indefinite if self.bytes[self.at..self.end].starts_with(&[0, 0]) => {
                    self.at += 2;
                    break;
                }
                _ => {}
            }
            let mut one = Vec::new();
            self.value(&mut one, depth)?;
            if pieces {
                if one[0] != OCTET_STRING {
                    return self.fail("an octet string of other pieces");
                }
                let head = if one[1] < INDEFINITE { 2 } else { 2 + usize::from(one[1] & 0x7f) };
                one.drain(..head);
            }
            out.append(&mut one);
        }
        self.end = outer;
        Ok(())
    }
}

fn put(out: &mut Vec<u8>, tag: u8, content: &[u8]) {
    out.push(tag);
    let length = content.len().to_be_bytes();
    let zeros = length.iter().take_while(|b| **b == 0).count();
    match content.len() {
        short @ 0..0x80 => out.extend(u8::try_from(short)),
        _ => {
            out.extend(u8::try_from(length.len() - zeros).map(|count| INDEFINITE | count));
            out.extend_from_slice(&length[zeros..]);
        }
    }
    out.extend_from_slice(content);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_become_definite_and_minimal_and_pieces_one() {
        let cases: [(&[u8], &[u8]); 6] = [
            (&[0x05, 0x00], &[0x05, 0x00]),
            (&[0x30, 0x80, 0x02, 0x01, 0x07, 0x00, 0x00], &[0x30, 0x03, 0x02, 0x01, 0x07]),
            (&[0x30, 0x83, 0x00, 0x00, 0x02, 0x05, 0x00], &[0x30, 0x02, 0x05, 0x00]),
            (&[0x24, 0x80, 0x04, 0x01, 0x61, 0x04, 0x02, 0x62, 0x63, 0x00, 0x00], &[0x04, 0x03, 0x61, 0x62, 0x63]),
            (&[0x24, 0x06, 0x24, 0x04, 0x04, 0x00, 0x04, 0x00], &[0x04, 0x00]),
            (&[0xa0, 0x80, 0x30, 0x80, 0x00, 0x00, 0x00, 0x00], &[0xa0, 0x02, 0x30, 0x00]),
        ];
        for (ber, der) in cases {
            assert_eq!(to_der(ber).unwrap(), der, "{ber:x?}");
            assert_eq!(to_der(der).unwrap(), der, "what is canonical stays");
        }
        let mut long = vec![0x04, 0x82, 0x01, 0x00];
        long.extend([7; 256]);
        assert_eq!(to_der(&long).unwrap(), long);
    }

    #[test]
    fn what_is_no_value_is_refused() {
        let deep = [[0x30, 0x80].repeat(DEEPEST + 1), vec![0; 2 * (DEEPEST + 1)]].concat();
        let cases: [(&[u8], &str); 9] = [
            (&[], "too early"),
            (&[0x30], "too early"),
            (&[0x04, 0x02, 0x01], "longer than"),
            (&[0x30, 0x03, 0x04, 0x02, 0x01], "longer than"),
            (&[0x30, 0x80, 0x05, 0x00], "too early"),
            (&[0x04, 0x80, 0x00, 0x00], "without a length"),
            (&[0x1f, 0x81, 0x00], "more than one byte"),
            (&[0x05, 0x00, 0x05, 0x00], "after its end"),
            (&[0x04, 0x85, 0, 0, 0, 0, 1, 7], "four bytes"),
        ];
        for (bad, word) in cases.into_iter().chain([(deep.as_slice(), "too deep")]) {
            let said = to_der(bad).unwrap_err().to_string();
            assert!(said.contains(word), "{bad:x?}: {said}");
        }
    }
}
