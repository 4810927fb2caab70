//! How the values of a configuration are written: prefixes, ports, endpoints, durations, the drift bound.
//!
//! Each has one strict reading, and what [`fmt::Display`] writes reads back as the same value.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
    time::Duration,
};

use thiserror::Error;

use super::model::{Endpoint, Ports, Prefix, Protocol};

/// Why a text is not the value it should be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ValueError {
    #[error("`{0}` is no IP address or prefix: write `10.0.0.100`, `fd00::100` or `10.0.0.0/24`")]
    NotAPrefix(String),
    #[error("`{given}` has host bits: write `{network}` for the prefix or `{host}` for the address")]
    HostBits { given: String, network: Prefix, host: IpAddr },
    #[error("`{0}` is an IPv4 address in IPv6 notation: write `{1}`")]
    MappedAddress(Ipv6Addr, Ipv4Addr),
    #[error("`{0}` is no protocol and port: write `tcp/5432` or `udp/7000-7100`, ports 1 to 65535")]
    NotPorts(String),
    #[error("port {0} is out of range: ports are 1 to 65535")]
    PortOutOfRange(String),
    #[error("the range `{first}-{last}` runs backwards: write `{last}-{first}`")]
    RangeBackwards { first: u16, last: u16 },
    #[error("`{0}` is no protocol: use `tcp`, `udp` or `sctp`")]
    NotAProtocol(String),
    #[error("`{0}` is no endpoint: write `tcp/10.0.0.2:2379` or `tcp/[fd00::2]:2379`")]
    NotAnEndpoint(String),
    #[error("`{0}` is no duration: write `2s`, `500ms` or `1m30s` (units h, m, s, ms, us, largest first)")]
    NotADuration(String),
    #[error("`{0}` is no drift bound: write `10%`, `0.5%` or `500ppm`")]
    NotADrift(String),
}

impl Prefix {
    /// Bits of an address of this family: 32 or 128.
    pub fn full_length(&self) -> u8 {
        match self.address {
            IpAddr::V4(_) => 32,
            IpAddr::V6(_) => 128,
        }
    }

    /// One address, as opposed to a range of them.
    pub fn is_host(&self) -> bool {
        self.length == self.full_length()
    }

    /// Whether every address of `other` is one of this prefix.
    pub fn contains(&self, other: &Prefix) -> bool {
        self.length <= other.length && network(other.address, self.length) == self.address
    }

    /// Whether the prefixes share an address.
    pub fn overlaps(&self, other: &Prefix) -> bool {
        self.contains(other) || other.contains(self)
    }

    /// The prefix that holds `address` alone.
    pub fn host(address: IpAddr) -> Self {
        let length = if address.is_ipv4() { 32 } else { 128 };
        Self { address, length }
    }
}

/// `address` with all but its first `length` bits cleared.
fn network(address: IpAddr, length: u8) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let mask = u32::MAX.checked_shl(32u32.saturating_sub(u32::from(length))).unwrap_or(0);
            IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() & mask))
        }
        IpAddr::V6(v6) => {
            let mask = u128::MAX.checked_shl(128u32.saturating_sub(u32::from(length))).unwrap_or(0);
            IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & mask))
        }
    }
}

/// An address that is not an IPv4 address in disguise, which no packet on the wire carries.
fn plain_address(address: IpAddr) -> Result<IpAddr, ValueError> {
    match address {
        IpAddr::V4(_) => Ok(address),
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(Ok(address), |v4| Err(ValueError::MappedAddress(v6, v4))),
    }
}

impl FromStr for Prefix {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let malformed = || ValueError::NotAPrefix(text.to_owned());
        let (address, length) = match text.split_once('/') {
            Some((address, length)) => (address, Some(number(length).ok_or_else(malformed)?)),
            None => (text, None),
        };
        let host = Prefix::host(plain_address(address.parse().map_err(|_| malformed())?)?);
        let length = length.unwrap_or(host.length);
        if length > host.length {
            return Err(malformed());
        }
        let prefix = Prefix { address: network(host.address, length), length };
        if prefix.address != host.address {
            return Err(ValueError::HostBits { given: text.to_owned(), network: prefix, host: host.address });
        }
        Ok(prefix)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_host() { write!(f, "{}", self.address) } else { write!(f, "{}/{}", self.address, self.length) }
    }
}

/// Digits alone: `u16::from_str` and its like also take a sign.
fn number<T: FromStr>(text: &str) -> Option<T> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

fn port(text: &str) -> Result<u16, ValueError> {
    number(text).filter(|&port| port != 0).ok_or_else(|| ValueError::PortOutOfRange(text.to_owned()))
}

impl FromStr for Protocol {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text {
            "tcp" => Ok(Protocol::Tcp),
            "udp" => Ok(Protocol::Udp),
            "sctp" => Ok(Protocol::Sctp),
            _ => Err(ValueError::NotAProtocol(text.to_owned())),
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
            Protocol::Sctp => "sctp",
        })
    }
}

impl FromStr for Ports {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let malformed = || ValueError::NotPorts(text.to_owned());
        let (protocol, range) = text.split_once('/').ok_or_else(malformed)?;
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        if ![first, last].iter().all(|port| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit())) {
            return Err(malformed());
        }
        let (protocol, first, last) = (protocol.parse()?, port(first)?, port(last)?);
        if first > last {
            return Err(ValueError::RangeBackwards { first, last });
        }
        Ok(Ports { protocol, first, last })
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.protocol, self.first)?;
        if self.last == self.first { Ok(()) } else { write!(f, "-{}", self.last) }
    }
}

impl FromStr for Endpoint {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let malformed = || ValueError::NotAnEndpoint(text.to_owned());
        let (protocol, address) = text.split_once('/').ok_or_else(malformed)?;
        let (_, digits) = address.rsplit_once(':').ok_or_else(malformed)?;
        let protocol = protocol.parse()?;
        let socket: SocketAddr = address.parse().map_err(|_| malformed())?;
        Ok(Endpoint { protocol, address: plain_address(socket.ip())?, port: port(digits)? })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.protocol, SocketAddr::new(self.address, self.port))
    }
}

/// Units of a duration and their nanoseconds, largest first.
const UNITS: [(&str, u64); 5] =
    [("h", 3_600_000_000_000), ("m", 60_000_000_000), ("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000)];

/// Reads `1m30s`: whole numbers with a unit, each unit once, the largest first.
///
/// Stricter than the crates for this, on purpose: with those a month is `1M`, one shift key away from a minute.
pub fn parse_duration(text: &str) -> Result<Duration, ValueError> {
    let malformed = || ValueError::NotADuration(text.to_owned());
    let mut rest = text;
    let mut units = UNITS.iter();
    let mut nanos = 0u64;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(malformed)?;
        let (count, tail) = rest.split_at(digits);
        let letters = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(letters);
        let (_, scale) = units.by_ref().find(|(name, _)| *name == unit).ok_or_else(malformed)?;
        let part = number(count).and_then(|count: u64| count.checked_mul(*scale)).ok_or_else(malformed)?;
        nanos = nanos.checked_add(part).ok_or_else(malformed)?;
        rest = tail;
    }
    if text.is_empty() { Err(malformed()) } else { Ok(Duration::from_nanos(nanos)) }
}

/// Writes a duration as [`parse_duration`] reads it, rounded down to a microsecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_nanos();
        if rest < 1_000 {
            return f.write_str("0s");
        }
        for (unit, scale) in UNITS {
            let count = rest / u128::from(scale);
            rest %= u128::from(scale);
            if count != 0 {
                write!(f, "{count}{unit}")?;
            }
        }
        Ok(())
    }
}

/// The first few of a list that may be long.
pub(crate) fn few<T: fmt::Display>(items: &[T]) -> String {
    const SHOWN: usize = 8;
    let mut shown: Vec<_> = items.iter().take(SHOWN).map(T::to_string).collect();
    if items.len() > SHOWN {
        shown.push(format!("and {} more", items.len() - SHOWN));
    }
    shown.join(", ")
}

/// Reads a drift bound as parts per million: `10%`, `0.5%` (up to four decimals) or `500ppm`.
pub fn parse_drift(text: &str) -> Result<u32, ValueError> {
    let malformed = || ValueError::NotADrift(text.to_owned());
    if let Some(ppm) = text.strip_suffix("ppm") {
        return number(ppm).ok_or_else(malformed);
    }
    let percent = text.strip_suffix('%').ok_or_else(malformed)?;
    let (whole, decimals) = percent.split_once('.').unwrap_or((percent, "0"));
    if decimals.is_empty() || decimals.len() > 4 {
        return Err(malformed());
    }
    // A percent is 10,000 ppm, hence four decimals.
    let part: u32 = number(&format!("{decimals:0<4}")).ok_or_else(malformed)?;
    let whole: u32 = number(whole).ok_or_else(malformed)?;
    whole.checked_mul(10_000).and_then(|ppm| ppm.checked_add(part)).ok_or_else(malformed)
}

/// Writes a drift bound as [`parse_drift`] reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drift(pub u32);

impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_multiple_of(1_000) {
            let decimals = self.0 % 10_000 / 1_000;
            write!(f, "{}", self.0 / 10_000)?;
            if decimals != 0 {
                write!(f, ".{decimals}")?;
            }
            f.write_str("%")
        } else {
            write!(f, "{}ppm", self.0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_strictly() {
        for (text, millis) in [("2s", 2_000), ("500ms", 500), ("1m30s", 90_000), ("1h", 3_600_000), ("0s", 0)] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in
            ["", "5", "s", "1M", "1.5s", "30s1m", "1s1s", "-1s", "1 s", "99999999999999999999s", "9999999999h", "1ß"]
        {
            assert_eq!(parse_duration(text), Err(ValueError::NotADuration(text.to_owned())), "{text}");
        }
    }

    #[test]
    fn durations_are_written_as_they_are_read() {
        for text in ["1h1m1s1ms1us", "26s500ms", "0s", "90us"] {
            assert_eq!(parse_duration(text).map(|span| Span(span).to_string()), Ok(text.to_owned()));
        }
        assert_eq!(Span(Duration::from_nanos(1_999)).to_string(), "1us");
    }

    #[test]
    fn drift_is_parts_per_million() {
        for (text, ppm) in [("10%", 100_000), ("0.5%", 5_000), ("0.0001%", 1), ("500ppm", 500), ("83333ppm", 83_333)] {
            assert_eq!(parse_drift(text), Ok(ppm), "{text}");
            assert_eq!(parse_drift(&Drift(ppm).to_string()), Ok(ppm), "{text}");
        }
        for text in ["", "%", "ppm", "10", "10 %", "-1%", "+1%", "1.%", "1.00001%", "500000%9", "999999999%"] {
            assert_eq!(parse_drift(text), Err(ValueError::NotADrift(text.to_owned())), "{text}");
        }
    }

    #[test]
    fn prefixes_have_no_host_bits() {
        for text in ["10.0.0.100", "fd00::100", "10.0.0.0/24", "0.0.0.0/0", "::/0", "fd00::/63"] {
            assert_eq!(text.parse::<Prefix>().map(|prefix| prefix.to_string()), Ok(text.to_owned()));
        }
        assert_eq!("10.0.0.1/32".parse::<Prefix>().map(|prefix| prefix.to_string()), Ok("10.0.0.1".to_owned()));
        let error = "10.0.0.5/24".parse::<Prefix>().map_err(|error| error.to_string());
        let expected = "`10.0.0.5/24` has host bits: write `10.0.0.0/24` for the prefix or `10.0.0.5` for the address";
        assert_eq!(error, Err(expected.to_owned()));
        for text in ["", "10.0.0", "10.0.0.1/33", "fd00::/129", "10.0.0.0/+8", "10.0.0.0/", "host", "::ffff:1.2.3.4"] {
            assert!(text.parse::<Prefix>().is_err(), "{text}");
        }
    }

    #[test]
    fn endpoints_and_ports_read_back() {
        for text in ["tcp/5432", "udp/7000-7100", "sctp/1-65535"] {
            assert_eq!(text.parse::<Ports>().map(|ports| ports.to_string()), Ok(text.to_owned()));
        }
        for text in ["tcp/0", "tcp/65536", "tcp/2-1", "tcp", "icmp/1", "tcp/+1", "tcp/", "tcp/1-", "/1", "tcp/1-2-3"] {
            assert!(text.parse::<Ports>().is_err(), "{text}");
        }
        for text in ["tcp/10.0.0.2:2379", "tcp/[fd00::2]:2379"] {
            assert_eq!(text.parse::<Endpoint>().map(|endpoint| endpoint.to_string()), Ok(text.to_owned()));
        }
        for text in ["tcp/10.0.0.2", "10.0.0.2:1", "tcp/10.0.0.2:0", "tcp/fd00::2:1", "tcp/[::ffff:1.2.3.4]:1"] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }
}
