//! Where HTTP is served: Unix sockets and loopback addresses.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::path::PathBuf;

use tokio::net::TcpListener;
use tokio::net::UnixListener;

/// An address to listen at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// A Unix socket.
    Unix(PathBuf),
    /// A port of the loopback interface.
    Tcp(SocketAddr),
}

impl Listen {
    /// Reads `unix:/PATH` or `ADDRESS:PORT`.
    pub(in crate::agent) fn parse(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = Path::new(path);
            return if path.is_absolute() {
                Ok(Self::Unix(path.to_owned()))
            } else {
                Err("the path of a socket begins with /".to_owned())
            };
        }
        let address: SocketAddr = text
            .parse()
            .map_err(|_| "this is neither a socket nor an address with a port".to_owned())?;
        if address.ip().is_loopback() {
            Ok(Self::Tcp(address))
        } else {
            Err("everybody on the network could see everything there".to_owned())
        }
    }

    /// Opens it. A Unix socket that a process which is gone has left behind is
    /// replaced.
    ///
    /// # Errors
    /// With the address, what the system says. Must be called in a runtime of
    /// tokio.
    pub async fn bind(&self, socket_mode: u32) -> io::Result<Bound> {
        let bound = match self {
            Self::Tcp(address) => TcpListener::bind(address).await.map(Bound::Tcp),
            Self::Unix(path) => bind_unix(path, socket_mode),
        };
        bound.map_err(|error| io::Error::new(error.kind(), format!("listening at {self}: {error}")))
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

fn bind_unix(path: &Path, mode: u32) -> io::Result<Bound> {
    let is_socket = path
        .symlink_metadata()
        .is_ok_and(|found| found.file_type().is_socket());
    if is_socket {
        // Nobody answers at what is left of a process.
        match std::os::unix::net::UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path)?;
            }
            _ => return Err(io::ErrorKind::AddrInUse.into()),
        }
    }
    let listener = UnixListener::bind(path)?;
    // Until here the mask for new files allows the owner at most what it does
    // by default.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    let inode = path.symlink_metadata()?.ino();
    Ok(Bound::Unix(Socket {
        listener,
        path: path.to_owned(),
        inode,
    }))
}

/// Something that accepts connections.
#[derive(Debug)]
pub enum Bound {
    /// A Unix socket.
    Unix(Socket),
    /// A port.
    Tcp(TcpListener),
}

/// A Unix socket, whose file goes when it is dropped.
#[derive(Debug)]
pub struct Socket {
    pub(super) listener: UnixListener,
    path: PathBuf,
    inode: u64,
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Not that of another process which has taken its place.
        if self
            .path
            .symlink_metadata()
            .is_ok_and(|found| found.ino() == self.inode)
        {
            drop(std::fs::remove_file(&self.path));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_local() {
        for (text, expected) in [
            ("unix:/run/x.sock", "unix:/run/x.sock"),
            ("127.0.0.1:8080", "127.0.0.1:8080"),
            ("127.3.2.1:0", "127.3.2.1:0"),
            ("[::1]:8080", "[::1]:8080"),
        ] {
            assert_eq!(Listen::parse(text).unwrap().to_string(), expected);
        }
        for bad in [
            "unix:run/x.sock",
            "unix:",
            "0.0.0.0:80",
            "[::]:80",
            "192.168.1.1:80",
            "[::ffff:10.0.0.1]:80",
            "localhost:80",
            "127.0.0.1",
            "",
        ] {
            assert!(Listen::parse(bad).is_err(), "{bad}");
        }
    }

    #[tokio::test]
    async fn a_socket_that_nobody_uses_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("http.sock");
        let listen = Listen::Unix(path.clone());
        // Left behind: this one does not remove its file.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let bound = listen.bind(0o640).await.unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o640);
        let error = listen.bind(0o640).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(error.to_string().contains("http.sock"), "{error}");
        drop(bound);
        assert!(!path.exists());
        // Another file is left alone.
        std::fs::write(&path, "x").unwrap();
        assert!(listen.bind(0o640).await.is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "x");
    }
}
