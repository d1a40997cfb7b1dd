//! Numbers of the summary: rounded so that another machine's mathematics library gives the same text, and with plus
//! infinity as a value that JSON can hold.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A finite number or plus infinity; in JSON a number of six significant digits or the text `inf`.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Value(pub f64);

/// Rounds to six significant digits: far below any noise here, far above differences between mathematics libraries.
fn rounded(x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    // Through text, because text is what must be the same.
    format!("{x:.5e}").parse().unwrap_or(x)
}

impl Value {
    pub fn new(x: f64) -> Self {
        Self(rounded(x))
    }
    pub fn get(self) -> f64 {
        self.0
    }
}

/// A fraction as per cent, without needless digits: `25 %`, `7.8 %`.
pub fn percent(fraction: f64) -> String {
    if !fraction.is_finite() {
        return "∞ %".to_owned();
    }
    let x = fraction * 100.0;
    let text = if x.abs() >= 100.0 { format!("{x:.0}") } else { format!("{x:.1}") };
    format!("{} %", text.strip_suffix(".0").unwrap_or(&text))
}

impl From<f64> for Value {
    fn from(x: f64) -> Self {
        Self::new(x)
    }
}

/// For people: four significant digits or so.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let x = self.0;
        let a = x.abs();
        if x == f64::INFINITY {
            f.write_str("∞")
        } else if a >= 1000.0 {
            write!(f, "{x:.0}")
        } else if a >= 100.0 {
            write!(f, "{x:.1}")
        } else if a >= 10.0 {
            write!(f, "{x:.2}")
        } else if a >= 0.1 || x == 0.0 {
            write!(f, "{x:.3}")
        } else {
            write!(f, "{x:.5}")
        }
    }
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let x = rounded(self.0);
        if x.is_nan() {
            s.serialize_str("nan")
        } else if x == f64::INFINITY {
            s.serialize_str("inf")
        } else if x == f64::NEG_INFINITY {
            s.serialize_str("-inf")
        } else {
            s.serialize_f64(x)
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Value;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number or \"inf\"")
            }
            fn visit_f64<E: de::Error>(self, x: f64) -> Result<Value, E> {
                Ok(Value(x))
            }
            fn visit_u64<E: de::Error>(self, x: u64) -> Result<Value, E> {
                Ok(Value(x as f64))
            }
            fn visit_i64<E: de::Error>(self, x: i64) -> Result<Value, E> {
                Ok(Value(x as f64))
            }
            fn visit_str<E: de::Error>(self, s: &str) -> Result<Value, E> {
                match s {
                    "inf" => Ok(Value(f64::INFINITY)),
                    "-inf" => Ok(Value(f64::NEG_INFINITY)),
                    "nan" => Ok(Value(f64::NAN)),
                    _ => Err(E::invalid_value(de::Unexpected::Str(s), &self)),
                }
            }
        }
        d.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_round_trip_with_infinity() {
        let v = vec![Value::new(1.0 / 3.0), Value(f64::INFINITY), Value(2.0)];
        let text = serde_json::to_string(&v).unwrap();
        assert_eq!(text, r#"[0.333333,"inf",2.0]"#);
        assert_eq!(serde_json::from_str::<Vec<Value>>(&text).unwrap(), v);
    }

    #[test]
    fn percents_are_short() {
        assert_eq!([0.25, 0.0784, 1.5, 0.0, f64::INFINITY].map(percent), ["25 %", "7.8 %", "150 %", "0 %", "∞ %"]);
    }

    #[test]
    fn people_read_few_digits() {
        let texts: Vec<String> =
            [1234.5, 123.456, 12.3456, 1.23456, 0.0123456, f64::INFINITY].map(|x| Value(x).to_string()).into();
        assert_eq!(texts, ["1234", "123.5", "12.35", "1.235", "0.01235", "∞"]);
    }
}
