//! Enough of HTTP/1.1 to use an application through its pages.

use std::io::Read as _;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::net::TcpStream;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;

/// A server that says nothing for so long is taken for stuck.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The status, such as 200.
    pub status: u16,
    /// Names in lower case, and values.
    pub headers: Vec<(String, String)>,
    /// The body, as text.
    pub body: String,
    /// The body.
    pub bytes: Vec<u8>,
}

impl Answer {
    /// The first header of that name, which is in lower case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        let (_, value) = headers.find(|(of, _)| of == name)?;
        Some(value)
    }
}

/// Asks the server at that port of 127.0.0.1, on a connection of its own.
///
/// `headers` are whole lines without their ends; a `form` is sent as it is.
///
/// # Errors
/// If there is no server, or it does not answer in time and in HTTP.
pub fn ask(
    port: u16,
    method: &str,
    path: &str,
    headers: &[&str],
    form: Option<&str>,
) -> Result<Answer> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut request =
        format!("{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n");
    for header in headers {
        request.push_str(header);
        request.push_str("\r\n");
    }
    if let Some(form) = form {
        let about = "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: ";
        request.push_str(&format!("{about}{}\r\n\r\n{form}", form.len()));
    } else {
        request.push_str("\r\n");
    }
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    parse(&answer).with_context(|| format!("the answer to {method} {path}"))
}

/// Reads all that came until the server closed the connection.
fn parse(bytes: &[u8]) -> Result<Answer> {
    const END: &[u8] = b"\r\n\r\n";
    let at = bytes.windows(END.len()).position(|part| part == END);
    let (head, rest) = bytes.split_at(at.context("no end of the headers")?);
    let rest = rest.get(END.len()..).unwrap_or_default();
    let head = String::from_utf8_lossy(head);
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1));
    let headers = lines.filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_ascii_lowercase(), value.trim().to_owned()))
    });
    let mut answer = Answer {
        status: status.context("no status")?.parse()?,
        headers: headers.collect(),
        body: String::new(),
        bytes: Vec::new(),
    };
    let chunked = answer.header("transfer-encoding") == Some("chunked");
    let body = if chunked {
        joined(rest)?
    } else {
        let length = answer.header("content-length");
        if let Some(length) = length
            && length.parse::<usize>()? != rest.len()
        {
            bail!("{} of {length} bytes", rest.len());
        }
        rest.to_vec()
    };
    answer.body = String::from_utf8_lossy(&body).into_owned();
    answer.bytes = body;
    Ok(answer)
}

/// What chunks hold: each has a line with its length in hexadecimal before it and
/// an end of line behind; the last is empty.
fn joined(mut rest: &[u8]) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = rest.windows(2).position(|part| part == b"\r\n");
        let (line, behind) = rest.split_at(end.context("a chunk without a length")?);
        let length = usize::from_str_radix(std::str::from_utf8(line)?.trim(), 16)?;
        if length == 0 {
            return Ok(body);
        }
        let chunk = behind.get(2..2 + length).context("a chunk that is cut")?;
        body.extend_from_slice(chunk);
        rest = behind.get(length + 4..).context("a chunk that is cut")?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_with_a_length_and_in_chunks() -> Result<()> {
        let whole = b"HTTP/1.1 200 OK\r\nX-A: b: c\r\nContent-Length: 5\r\n\r\nhello";
        let answer = parse(whole)?;
        assert_eq!((answer.status, answer.body.as_str()), (200, "hello"));
        assert_eq!(answer.header("x-a"), Some("b: c"));
        let chunks = b"HTTP/1.1 302 Found\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\nA\r\nlo, worlds\r\n0\r\n\r\n";
        let answer = parse(chunks)?;
        assert_eq!(
            (answer.status, answer.body.as_str()),
            (302, "hello, worlds")
        );
        Ok(())
    }

    #[test]
    fn half_an_answer_is_none() {
        for half in [
            "",
            "HTTP/1.1 200 OK\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhe",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n",
        ] {
            assert!(parse(half.as_bytes()).is_err(), "{half:?}");
        }
    }
}
