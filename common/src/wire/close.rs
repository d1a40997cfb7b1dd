//! Why a connection or a stream ends: application error codes of QUIC. A refusal's words go in a message before the
//! close; the close itself has only the code and a short text.

/// Numbers are part of the wire and never change meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// An orderly end, after the goodbye.
    Goodbye = 0,
    /// A newer connection of the same agent took over.
    Replaced = 1,
    /// The peer was told why in a message.
    Refused = 2,
    /// The peer sent something that this side does not accept.
    BadPeer = 3,
    /// The peer was too slow in something that was begun.
    TooSlow = 4,
    /// This side is shutting down.
    ShuttingDown = 5,
    /// A failure of this side's own; trying again may help.
    Internal = 6,
    /// This coordinator stands by; another one is active, and the agent tries that one.
    Standby = 7,
}

impl Close {
    pub fn code(self) -> u32 {
        self as u32
    }

    pub fn of_code(code: u64) -> Option<Self> {
        [
            Self::Goodbye,
            Self::Replaced,
            Self::Refused,
            Self::BadPeer,
            Self::TooSlow,
            Self::ShuttingDown,
            Self::Internal,
            Self::Standby,
        ]
        .into_iter()
        .find(|c| u64::from(c.code()) == code)
    }

    /// In words, for the side that is told.
    pub fn words(self) -> &'static str {
        match self {
            Self::Goodbye => "the peer said goodbye",
            Self::Replaced => "a newer connection of this agent took over",
            Self::Refused => "the peer refused this side",
            Self::BadPeer => "the peer did not accept what this side sent",
            Self::TooSlow => "this side was too slow for the peer",
            Self::ShuttingDown => "the peer is shutting down",
            Self::Internal => "the peer failed",
            Self::Standby => "the peer stands by; another coordinator is active",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for code in 0..8 {
            assert_eq!(Close::of_code(code).map(|c| u64::from(c.code())), Some(code));
        }
        assert_eq!(Close::of_code(8), None);
    }
}
