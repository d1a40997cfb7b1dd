//! User data of a host: the deadline's timer first, then the agent. Templates: `infra/cloud/guest`, units: `infra/units`.

use crate::cloud::UserData;
use drums_common::clock::Micros;

const TEMPLATE: &str = include_str!("../../cloud/guest/user-data.sh");
const FILES: [(&str, &str); 6] = [
    ("drums-deadline", include_str!("../../cloud/guest/drums-deadline")),
    ("drums-deadline.service", include_str!("../../units/drums-deadline.service")),
    ("drums-fetch-agent", include_str!("../../cloud/guest/drums-fetch-agent")),
    ("drums-fetch-agent.service", include_str!("../../units/drums-fetch-agent.service")),
    ("drums-watchdog.service", include_str!("../../units/drums-watchdog.service")),
    ("drums-agent.service", include_str!("../../units/drums-agent.service")),
];
/// What EC2 takes.
const MAX_BYTES: usize = 16_384;

/// What a host must know to die in time and to become an agent.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Absolute.
    pub deadline: Micros,
    /// From its launch to its deadline, as registered: what a host whose clock is wrong goes by. In milliseconds.
    pub lifetime_ms: u64,
    /// Where the agent is fetched from: a presigned URL.
    pub agent_url: String,
    /// SHA-256 of the agent, in hexadecimal digits.
    pub agent_sha256: String,
    /// Enrolment: single use, bound to the launch.
    pub token: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BadGuest {
    /// A lifetime of nothing, or a deadline before 1970.
    NoLife,
    /// Would end the line that it stands in, or its quotes.
    Text(&'static str),
    /// Beyond what EC2 takes.
    TooLong { bytes: usize },
}

impl std::fmt::Display for BadGuest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoLife => write!(f, "user data of a host without a life to come; give a deadline in the future"),
            Self::Text(what) => write!(f, "user data with {what} that the guest's shell would misread; it is refused"),
            Self::TooLong { bytes } => {
                write!(f, "user data of {bytes} bytes; EC2 takes {MAX_BYTES}: shorten the token or the URL")
            }
        }
    }
}

impl std::error::Error for BadGuest {}

impl Guest {
    pub fn user_data(&self) -> Result<UserData, BadGuest> {
        let (deadline_s, lifetime_s) = (self.deadline.0.div_euclid(1_000_000), self.lifetime_ms / 1_000);
        if deadline_s <= 0 || lifetime_s == 0 {
            return Err(BadGuest::NoLife);
        }
        let plain = |what, text: &str| {
            let ok = !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic() && !b"'\"\\`@".contains(&b));
            ok.then_some(()).ok_or(BadGuest::Text(what))
        };
        plain("an agent's URL", &self.agent_url)?;
        plain("an agent's digest", &self.agent_sha256)?;
        plain("a token", &self.token)?;
        let mut text = TEMPLATE.to_owned();
        for (name, content) in FILES {
            text = text.replace(&format!("@FILE {name}@"), content.trim_end());
        }
        for (name, value) in [
            ("@DEADLINE_S@", deadline_s.to_string()),
            ("@LIFETIME_S@", lifetime_s.to_string()),
            ("@AGENT_URL@", self.agent_url.clone()),
            ("@AGENT_SHA256@", self.agent_sha256.clone()),
            ("@TOKEN@", self.token.clone()),
        ] {
            text = text.replace(name, &value);
        }
        if text.len() > MAX_BYTES {
            return Err(BadGuest::TooLong { bytes: text.len() });
        }
        Ok(UserData(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest() -> Guest {
        Guest {
            deadline: Micros(1_796_007_200_000_000),
            lifetime_ms: 7_200_000,
            agent_url: "https://bucket.example/agent?X-Amz-Signature=0a&X-Amz-Expires=900".to_owned(),
            agent_sha256: "5".repeat(64),
            token: "drums-token-1".to_owned(),
        }
    }

    #[test]
    fn the_first_line_arms_the_timer_and_every_file_is_whole() {
        let text = guest().user_data().unwrap().0;
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(&lines[..2], ["#cloud-boothook", "#!/bin/sh"]);
        assert!(lines[2].starts_with("d=1796007200 l=7200; ") && lines[2].contains("poweroff"), "{}", lines[2]);
        for (name, content) in FILES {
            assert!(text.contains(content.trim_end()), "{name}");
            assert!(!content.contains("END_OF_FILE"), "{name} would end early");
        }
        assert!(!text.contains("@FILE") && !text.contains("_S@"), "all is filled in");
    }

    #[test]
    fn the_shell_takes_it() {
        use std::io::Write as _;
        let text = guest().user_data().unwrap().0;
        let script = text.strip_prefix("#cloud-boothook\n").unwrap();
        let mut sh = std::process::Command::new("sh").arg("-n").stdin(std::process::Stdio::piped()).spawn().unwrap();
        sh.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        assert!(sh.wait().unwrap().success());
    }

    #[test]
    fn what_the_shell_would_misread_and_what_has_no_life_is_refused() {
        for (bad, what) in [("a'b", "a quote"), ("a\nb", "a line's end"), ("", "nothing"), ("a@TOKEN@", "a place")] {
            assert_eq!(
                Guest { token: bad.to_owned(), ..guest() }.user_data(),
                Err(BadGuest::Text("a token")),
                "{what}"
            );
            assert!(Guest { agent_url: bad.to_owned(), ..guest() }.user_data().is_err(), "{what}");
        }
        assert_eq!(Guest { lifetime_ms: 999, ..guest() }.user_data(), Err(BadGuest::NoLife));
        assert_eq!(Guest { deadline: Micros(0), ..guest() }.user_data(), Err(BadGuest::NoLife));
        let long = Guest { agent_url: "u".repeat(MAX_BYTES), ..guest() }.user_data();
        assert!(matches!(long, Err(BadGuest::TooLong { .. })));
    }
}
