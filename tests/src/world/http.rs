//! The few lines of HTTP/1.1 that a test needs to ask an agent through its socket.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use rustix::net::sockopt::socket_peercred;
use serde_json::Value;

/// What the agent answered.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The HTTP status, such as 200.
    pub status: u16,
    pub body: String,
    /// The process that made the socket: on one path, who answers may change.
    pub pid: u32,
}

impl Answer {
    /// The body as JSON; panics with the body if it is none.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("no JSON ({e}): {} {}", self.status, self.body))
    }
}

/// Sends one request and reads the whole answer. Fails if the agent is silent for `timeout`.
pub(super) fn request(
    socket: &Path,
    method: &str,
    path: &str,
    body: Option<&Value>,
    timeout: Duration,
) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    let body = body.map(Value::to_string).unwrap_or_default();
    let kind = if body.is_empty() { "" } else { "Content-Type: application/json\r\n" };
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: portcullis\r\nConnection: close\r\n{kind}Content-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let pid = socket_peercred(&stream)?.pid.as_raw_pid().cast_unsigned();
    parse(&answer, pid)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("not an HTTP answer: {answer:?}")))
}

fn parse(answer: &str, pid: u32) -> Option<Answer> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    let chunked = head.lines().any(|line| line.eq_ignore_ascii_case("transfer-encoding: chunked"));
    let body = if chunked { unchunk(body)? } else { body.to_owned() };
    Some(Answer { status, body, pid })
}

fn unchunk(mut rest: &str) -> Option<String> {
    let mut body = String::new();
    loop {
        let (length, after) = rest.split_once("\r\n")?;
        let length = usize::from_str_radix(length, 16).ok()?;
        if length == 0 {
            return Some(body);
        }
        body.push_str(after.get(..length)?);
        rest = after.get(length..)?.strip_prefix("\r\n")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_whole() {
        let plain = parse("HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}", 7);
        assert_eq!(plain, Some(Answer { status: 404, body: "{}".into(), pid: 7 }));
        let chunked = parse("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n[1,\r\n2\r\n2]\r\n0\r\n\r\n", 7);
        assert_eq!(chunked, Some(Answer { status: 200, body: "[1,2]".into(), pid: 7 }));
        assert_eq!(parse("SSH-2.0-OpenSSH", 7), None);
    }
}
