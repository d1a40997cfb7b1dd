//! Reads typed fields out of a TOML tree, and goes on after a fault so that one pass reports them all.

use std::{ops::Range, str::FromStr};

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::diagnostic::Faults;
use crate::range::{Real, Whole};

/// A value and where it stands.
#[derive(Clone, Debug)]
pub(super) struct Sp<T> {
    pub(super) span: Range<usize>,
    pub(super) value: T,
}

/// One table of the spec with the fields it may have.
pub(super) struct Tab<'t, 's> {
    /// As the user writes it: `[limits]`, `[[arm]]`.
    name: String,
    span: Range<usize>,
    entries: &'t DeTable<'s>,
}

impl<'t, 's> Tab<'t, 's> {
    /// Refuses every field that is not in `fields`.
    pub(super) fn new(
        name: &str,
        span: Range<usize>,
        entries: &'t DeTable<'s>,
        fields: &[&str],
        faults: &mut Faults<'_>,
    ) -> Self {
        for (key, _) in entries.iter() {
            let k: &str = key.get_ref();
            if !fields.contains(&k) {
                let help = match (other_unit(k, fields), nearest(k, fields)) {
                    (Some(meant), _) => {
                        let message = format!("{k:?} has a unit that {name} does not take");
                        faults.add("unit-mismatch", key.span(), message, format!("write the value as {meant}"));
                        continue;
                    }
                    (None, Some(meant)) => format!("did you mean {meant:?}? {name} has {}", fields.join(", ")),
                    (None, None) => format!("{name} has {}", fields.join(", ")),
                };
                faults.add("unknown-field", key.span(), format!("unknown field {k:?} in {name}"), help);
            }
        }
        Self { name: name.to_owned(), span, entries }
    }

    pub(super) fn span(&self) -> Range<usize> {
        self.span.clone()
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.entries.get(key).is_some()
    }

    fn raw(&self, key: &str) -> Option<&'t Spanned<DeValue<'s>>> {
        self.entries.get(key)
    }

    /// The entry, or a fault that it is missing.
    fn need(&self, key: &str, expected: &str, faults: &mut Faults<'_>) -> Option<&'t Spanned<DeValue<'s>>> {
        let found = self.raw(key);
        if found.is_none() {
            let message = format!("{} has no {key:?}", self.name);
            faults.add("missing-field", self.span(), message, format!("add {key} = {expected}"));
        }
        found
    }

    pub(super) fn text(&self, key: &str, expected: &str, faults: &mut Faults<'_>) -> Option<Sp<String>> {
        text_of(self.need(key, expected, faults)?, key, faults)
    }

    pub(super) fn text_or_none(&self, key: &str, faults: &mut Faults<'_>) -> Option<Sp<String>> {
        text_of(self.raw(key)?, key, faults)
    }

    /// A text that parses to `T`; its own error says what was expected.
    pub(super) fn id<T>(&self, key: &str, expected: &str, faults: &mut Faults<'_>) -> Option<Sp<T>>
    where
        T: FromStr,
        T::Err: std::fmt::Display,
    {
        parsed(self.text(key, expected, faults)?, key, faults)
    }

    pub(super) fn id_or_none<T>(&self, key: &str, faults: &mut Faults<'_>) -> Option<Sp<T>>
    where
        T: FromStr,
        T::Err: std::fmt::Display,
    {
        parsed(self.text_or_none(key, faults)?, key, faults)
    }

    /// A whole number of the range.
    pub(super) fn int(&self, key: &str, range: Whole, faults: &mut Faults<'_>) -> Option<Sp<u64>> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        let found = self.need(key, &format!("N, {expected}"), faults)?;
        let DeValue::Integer(number) = found.get_ref() else {
            wrong_type(found, key, &expected, faults);
            return None;
        };
        let digits = number.as_str().replace('_', "");
        let negative = digits.starts_with('-');
        let value = u64::from_str_radix(digits.trim_start_matches(['+', '-']), number.radix()).ok();
        match value {
            Some(v) if (!negative || v == 0) && range.contains(&v) => Some(Sp { span: found.span(), value: v }),
            _ => {
                let message = format!("{key} = {digits} is out of range");
                faults.add("out-of-range", found.span(), message, format!("expected {expected}"));
                None
            }
        }
    }

    pub(super) fn int_or(&self, key: &str, range: Whole, default: u64, faults: &mut Faults<'_>) -> Option<u64> {
        if self.has(key) { Some(self.int(key, range, faults)?.value) } else { Some(default) }
    }

    /// A number of the range.
    pub(super) fn float(&self, key: &str, range: Real, faults: &mut Faults<'_>) -> Option<Sp<f64>> {
        let Real { low, closed, high } = range;
        let expected = if closed {
            format!("a number from {low} to {high}")
        } else {
            format!("a number above {low}, at most {high}")
        };
        let found = self.need(key, &format!("X, {expected}"), faults)?;
        let value = match found.get_ref() {
            DeValue::Float(f) => f.as_str().replace('_', "").parse::<f64>().ok(),
            DeValue::Integer(i) if i.radix() == 10 => i.as_str().replace('_', "").parse::<f64>().ok(),
            _ => {
                wrong_type(found, key, &expected, faults);
                return None;
            }
        };
        match value {
            Some(v) if range.contains(v) => Some(Sp { span: found.span(), value: v }),
            Some(v) if !v.is_finite() => {
                faults.add(
                    "not-finite",
                    found.span(),
                    format!("{key} is not a finite number"),
                    format!("expected {expected}"),
                );
                None
            }
            v => {
                let shown = v.map_or_else(|| "this".to_owned(), |v| v.to_string());
                let message = format!("{key} = {shown} is out of range");
                faults.add("out-of-range", found.span(), message, format!("expected {expected}"));
                None
            }
        }
    }

    pub(super) fn float_or(&self, key: &str, range: Real, default: f64, faults: &mut Faults<'_>) -> Option<f64> {
        if self.has(key) { Some(self.float(key, range, faults)?.value) } else { Some(default) }
    }

    pub(super) fn bool_or(&self, key: &str, default: bool, faults: &mut Faults<'_>) -> Option<bool> {
        let Some(found) = self.raw(key) else { return Some(default) };
        let value = found.get_ref().as_bool();
        if value.is_none() {
            wrong_type(found, key, "true or false", faults);
        }
        value
    }

    /// An offset date-time, in microseconds since 1970.
    pub(super) fn instant_or_none(&self, key: &str, faults: &mut Faults<'_>) -> Option<Sp<i64>> {
        let expected = "a UTC date-time, as in 2027-01-31T12:00:00Z";
        let found = self.raw(key)?;
        let DeValue::Datetime(stamp) = found.get_ref() else {
            wrong_type(found, key, expected, faults);
            return None;
        };
        let value = unix_micros(stamp);
        if value.is_none() {
            faults.add(
                "not-an-instant",
                found.span(),
                format!("{key} = {stamp} has no offset"),
                format!("expected {expected}"),
            );
        }
        Some(Sp { span: found.span(), value: value? })
    }

    pub(super) fn texts_or_empty(&self, key: &str, faults: &mut Faults<'_>) -> Vec<Sp<String>> {
        let Some(found) = self.raw(key) else { return Vec::new() };
        let DeValue::Array(items) = found.get_ref() else {
            wrong_type(found, key, "a list of texts", faults);
            return Vec::new();
        };
        items.iter().filter_map(|item| text_of(item, key, faults)).collect()
    }

    /// A sub-table that must be there.
    pub(super) fn table(&self, key: &str, fields: &[&str], faults: &mut Faults<'_>) -> Option<Tab<'t, 's>> {
        let Some(found) = self.raw(key) else {
            faults.add(
                "missing-table",
                self.span(),
                format!("the spec has no [{key}]"),
                format!("add [{key}] with {}", fields.join(", ")),
            );
            return None;
        };
        self.as_table(found, &format!("[{key}]"), fields, faults)
    }

    pub(super) fn table_or_none(&self, key: &str, fields: &[&str], faults: &mut Faults<'_>) -> Option<Tab<'t, 's>> {
        self.as_table(self.raw(key)?, &format!("{} {key}", self.name), fields, faults)
    }

    /// `[[key]]`, at least one.
    pub(super) fn tables(&self, key: &str, fields: &[&str], faults: &mut Faults<'_>) -> Vec<Tab<'t, 's>> {
        let Some(found) = self.raw(key) else {
            faults.add(
                "missing-table",
                self.span(),
                format!("the spec has no [[{key}]]"),
                format!("add at least one [[{key}]] with {}", fields.join(", ")),
            );
            return Vec::new();
        };
        let DeValue::Array(items) = found.get_ref() else {
            wrong_type(found, key, &format!("tables written as [[{key}]]"), faults);
            return Vec::new();
        };
        items.iter().filter_map(|item| self.as_table(item, &format!("[[{key}]]"), fields, faults)).collect()
    }

    fn as_table(
        &self,
        found: &'t Spanned<DeValue<'s>>,
        name: &str,
        fields: &[&str],
        faults: &mut Faults<'_>,
    ) -> Option<Tab<'t, 's>> {
        match found.get_ref() {
            DeValue::Table(entries) => Some(Tab::new(name, found.span(), entries, fields, faults)),
            _ => {
                wrong_type(found, name, "a table", faults);
                None
            }
        }
    }
}

fn text_of(found: &Spanned<DeValue<'_>>, key: &str, faults: &mut Faults<'_>) -> Option<Sp<String>> {
    match found.get_ref() {
        DeValue::String(s) if s.trim().is_empty() => {
            faults.add(
                "empty",
                found.span(),
                format!("{key} is empty"),
                "write something, or leave an optional field out",
            );
            None
        }
        DeValue::String(s) => Some(Sp { span: found.span(), value: s.to_string() }),
        _ => {
            wrong_type(found, key, "a text in quotes", faults);
            None
        }
    }
}

fn parsed<T>(text: Sp<String>, key: &str, faults: &mut Faults<'_>) -> Option<Sp<T>>
where
    T: FromStr,
    T::Err: std::fmt::Display,
{
    match text.value.parse::<T>() {
        Ok(value) => Some(Sp { span: text.span, value }),
        Err(e) => {
            let said = e.to_string();
            let (message, help) = match said.split_once(": expected ") {
                Some((m, h)) => (format!("{key}: {m}"), format!("expected {h}")),
                None => (format!("{key}: {said}"), "correct the value".to_owned()),
            };
            faults.add("bad-value", text.span, message, help);
            None
        }
    }
}

fn wrong_type(found: &Spanned<DeValue<'_>>, key: &str, expected: &str, faults: &mut Faults<'_>) {
    let message = format!("{key} is {}", described(found.get_ref()));
    faults.add("wrong-type", found.span(), message, format!("expected {expected}"));
}

fn described(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a text",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a number with a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date or time",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// Units that fields carry at their ends.
const UNITS: [&str; 18] = [
    "_ms",
    "_s",
    "_us",
    "_ns",
    "_seconds",
    "_minutes",
    "_hours",
    "_bytes",
    "_kib",
    "_mib",
    "_gib",
    "_kb",
    "_mb",
    "_gb",
    "_percent",
    "_fraction",
    "_milli",
    "_m",
];

/// The field of `fields` that has the stem of `key` and another unit.
fn other_unit<'f>(key: &str, fields: &[&'f str]) -> Option<&'f str> {
    let stem = |s: &str| UNITS.iter().filter_map(|u| s.strip_suffix(u)).min_by_key(|s| s.len()).unwrap_or(s).to_owned();
    fields.iter().copied().find(|f| *f != key && stem(f) == stem(key) && stem(f) != **f)
}

/// The field that `key` is most likely a slip of.
fn nearest<'f>(key: &str, fields: &[&'f str]) -> Option<&'f str> {
    let best = fields.iter().map(|f| (distance(key, f), *f)).min()?;
    (best.0 <= 1 + key.len() / 4).then_some(best.1)
}

/// Levenshtein distance, in bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// Microseconds since 1970; none without a full date, time and offset.
fn unix_micros(stamp: &toml::value::Datetime) -> Option<i64> {
    let (date, time) = (stamp.date?, stamp.time?);
    let offset_minutes = match stamp.offset? {
        toml::value::Offset::Z => 0,
        toml::value::Offset::Custom { minutes } => i64::from(minutes),
    };
    // Days since 1970 in the proleptic Gregorian calendar: years counted from March, so that the leap day comes last.
    let (year, month, day) = (i64::from(date.year), i64::from(date.month), i64::from(date.day));
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days =
        y * 365 + y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400) + (m * 153 + 2) / 5 + day - 1 - 719_468;
    let seconds = days * 86_400 + i64::from(time.hour) * 3_600 + i64::from(time.minute) * 60 + i64::from(time.second)
        - offset_minutes * 60;
    Some(seconds * 1_000_000 + i64::from(time.nanosecond) / 1_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instants_are_those_of_the_calendar() {
        let at = |s: &str| unix_micros(&s.parse().unwrap()).map(|us| us / 1_000_000);
        assert_eq!(at("1970-01-01T00:00:00Z"), Some(0));
        assert_eq!(at("2000-02-29T12:00:00Z"), Some(951_825_600));
        assert_eq!(at("2026-11-29T20:00:00+01:00"), Some(1_795_978_800));
        assert_eq!(at("2026-11-29T20:00:00"), None);
    }

    #[test]
    fn slips_and_units_are_told_apart() {
        assert_eq!(other_unit("memory_gb", &["cpu_milli", "memory_mib"]), Some("memory_mib"));
        assert_eq!(other_unit("memory", &["memory_mib"]), Some("memory_mib"));
        assert_eq!(nearest("titel", &["title", "hypothesis"]), Some("title"));
        assert_eq!(nearest("colour", &["title", "hypothesis"]), None);
    }
}
