//! The few lines of HTTP/1.1 that a test needs to ask an agent through its socket.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use portcullis::core::time::BootInstant;
use rustix::net::sockopt::socket_peercred;
use serde_json::Value;

use crate::clock;

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
    let mut stream = connect(socket, timeout)?;
    stream.write_all(encode(method, path, body, "close").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let pid = socket_peercred(&stream)?.pid.as_raw_pid().cast_unsigned();
    parse(&answer, pid)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("not an HTTP answer: {answer:?}")))
}

/// A connection that carries one request after the other.
#[derive(Debug)]
pub struct Connection {
    stream: BufReader<UnixStream>,
    pid: u32,
}

impl Connection {
    pub(super) fn open(socket: &Path, timeout: Duration) -> io::Result<Self> {
        let stream = connect(socket, timeout)?;
        let pid = socket_peercred(&stream)?.pid.as_raw_pid().cast_unsigned();
        Ok(Self { stream: BufReader::new(stream), pid })
    }

    /// Sends a request and reads its answer.
    ///
    /// # Errors
    /// The agent has hung up, is silent for too long, or answers without saying how long its answer is.
    pub fn ask(&mut self, method: &str, path: &str, body: Option<&Value>) -> io::Result<Answer> {
        self.send(method, path, body)?;
        self.receive()
    }

    /// Sends a request, and returns the instant at which the socket was about to be given it, in one piece.
    ///
    /// # Errors
    /// The agent has hung up, or does not read.
    pub fn send(&mut self, method: &str, path: &str, body: Option<&Value>) -> io::Result<BootInstant> {
        let request = encode(method, path, body, "keep-alive");
        let at = clock::now();
        self.stream.get_mut().write_all(request.as_bytes())?;
        Ok(at)
    }

    /// Reads the answer to the request that was sent first and not answered yet.
    ///
    /// # Errors
    /// As [`Connection::ask`].
    pub fn receive(&mut self) -> io::Result<Answer> {
        let mut answer = String::new();
        while !answer.ends_with("\r\n\r\n") {
            if self.stream.read_line(&mut answer)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        let invalid = |what| io::Error::new(io::ErrorKind::InvalidData, format!("{what}: {answer:?}"));
        let length = answer.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
        let mut body = vec![0; length.ok_or_else(|| invalid("an answer without a length"))?];
        self.stream.read_exact(&mut body)?;
        let body = String::from_utf8(body).map_err(|_| invalid("an answer that is not UTF-8"))?;
        parse(&(answer.clone() + &body), self.pid).ok_or_else(|| invalid("not an HTTP answer"))
    }
}

fn connect(socket: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    Ok(stream)
}

fn encode(method: &str, path: &str, body: Option<&Value>, connection: &str) -> String {
    let body = body.map(Value::to_string).unwrap_or_default();
    let kind = if body.is_empty() { "" } else { "Content-Type: application/json\r\n" };
    format!(
        "{method} {path} HTTP/1.1\r\nHost: portcullis\r\nConnection: {connection}\r\n{kind}Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
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
