//! Which requests are let in.
//!
//! A page of a stranger in a browser on this machine may make requests to
//! loopback ports. What it must not get is an answer. It could, if it were from
//! a host whose name leads here now (DNS rebinding): such a request has that
//! name as its `Host`. And it must not make the agent work: requests that a page
//! makes in the background say so (`Sec-Fetch-Site`). Unix sockets are out of a
//! page's reach.

use std::net::IpAddr;
use std::str::FromStr as _;

use hyper::HeaderMap;
use hyper::StatusCode;
use hyper::Uri;
use hyper::header::HOST;
use hyper::http::uri::Authority;

/// Why a request is not answered.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) status: StatusCode,
    pub(super) why: &'static str,
}

/// Looks at a request that came over TCP. `hosts`: further names for this
/// machine.
pub(super) fn check(headers: &HeaderMap, uri: &Uri, hosts: &[String]) -> Result<(), Refused> {
    let bad = |why| Refused {
        status: StatusCode::BAD_REQUEST,
        why,
    };
    let forbidden = |why| Refused {
        status: StatusCode::FORBIDDEN,
        why,
    };
    let mut given = headers.get_all(HOST).iter();
    let host = match (given.next(), given.next()) {
        (Some(host), None) => host,
        (None, _) => return Err(bad("the request has no Host")),
        (Some(_), Some(_)) => return Err(bad("the request has more than one Host")),
    };
    let host = host
        .to_str()
        .ok()
        .and_then(|host| Authority::from_str(host).ok())
        .ok_or_else(|| bad("the request's Host is none"))?;
    // A request to a proxy has the host in its first line as well.
    let all_known = [Some(&host), uri.authority()]
        .into_iter()
        .flatten()
        .all(|authority| is_known(authority.host(), hosts));
    if !all_known {
        return Err(forbidden(
            "the request's Host is not this machine; http.hosts lists further names for it",
        ));
    }
    let header = |name| headers.get(name).map(hyper::header::HeaderValue::as_bytes);
    if header("sec-fetch-site") == Some(b"cross-site")
        && header("sec-fetch-mode") != Some(b"navigate")
    {
        return Err(forbidden("a page of another site made this request"));
    }
    Ok(())
}

fn is_known(host: &str, hosts: &[String]) -> bool {
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    match IpAddr::from_str(bare) {
        Ok(address) => address.is_loopback(),
        Err(_) => {
            let host = host.to_ascii_lowercase();
            host == "localhost" || hosts.contains(&host)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(headers: &[(&'static str, &'static str)], uri: &'static str) -> u16 {
        let mut map = HeaderMap::new();
        for &(name, value) in headers {
            map.append(name, value.parse().unwrap());
        }
        let hosts = ["profiler.internal".to_owned()];
        match check(&map, &Uri::from_static(uri), &hosts) {
            Ok(()) => 200,
            Err(refused) => refused.status.as_u16(),
        }
    }

    #[test]
    fn only_this_machine_s_names_are_answered() {
        for (host, expected) in [
            ("localhost", 200),
            ("LOCALHOST:8080", 200),
            ("127.0.0.1:8080", 200),
            ("127.9.9.9", 200),
            ("[::1]:8080", 200),
            ("profiler.internal:80", 200),
            ("Profiler.Internal", 200),
            ("evil.example", 403),
            ("evil.example:8080", 403),
            ("localhost.evil.example", 403),
            ("127.0.0.1.evil.example", 403),
            ("10.0.0.1", 403),
            ("user@evil.example", 403),
            ("a b", 400),
        ] {
            assert_eq!(status(&[("host", host)], "/"), expected, "{host}");
        }
        assert_eq!(status(&[], "/"), 400);
        assert_eq!(status(&[("host", "localhost"), ("host", "evil")], "/"), 400);
        assert_eq!(status(&[("host", "localhost")], "http://evil/x"), 403);
    }

    #[test]
    fn pages_of_others_make_no_requests() {
        let with = |site, mode| {
            let headers = [
                ("host", "localhost"),
                ("sec-fetch-site", site),
                ("sec-fetch-mode", mode),
            ];
            status(&headers, "/")
        };
        assert_eq!(with("cross-site", "no-cors"), 403);
        // A link that somebody followed.
        assert_eq!(with("cross-site", "navigate"), 200);
        assert_eq!(with("same-origin", "cors"), 200);
        assert_eq!(with("none", "navigate"), 200);
    }
}
