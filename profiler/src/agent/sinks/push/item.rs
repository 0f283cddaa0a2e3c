//! A request that waits to be sent, in memory or in a file.
//!
//! A file has all that the request needs besides the receiver's address and who we
//! are, which are those of the configuration when it is sent:
//!
//! | bytes | what |
//! |---|---|
//! | 8 | `rbspill1` |
//! | 4 | CRC-32 of all that follows, little endian |
//! | 4 | length of the head, little endian |
//! | | the head: JSON |
//! | | the body, up to the end |

use std::io;
use std::io::Write;

use bytes::Bytes;
use serde::Deserialize;
use serde::Serialize;

const MAGIC: &[u8; 8] = b"rbspill1";
/// Where the checksum's bytes begin.
const CHECKED: usize = 12;
/// Where the head begins.
const HEAD: usize = 16;

/// What is in a file besides the body.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Head {
    /// Protocol and version; see [`Protocol::format`](super::Protocol::format).
    pub(super) format: String,
    /// What follows the receiver's address: path and query.
    pub(super) target: String,
    /// Whether the body is compressed in a way that its type does not tell.
    pub(super) gzip: bool,
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) head: Head,
    pub(super) body: Bytes,
}

#[cfg(test)]
impl Item {
    /// One for tests, with that body.
    pub(super) fn of_text(text: &str) -> Self {
        Self {
            head: Head {
                format: "test".to_owned(),
                target: "/".to_owned(),
                gzip: false,
            },
            body: text.to_owned().into(),
        }
    }
}

impl Item {
    /// What it takes in memory or in a file, about.
    pub(super) fn size(&self) -> u64 {
        let head = self.head.format.len() + self.head.target.len() + 128;
        (head + self.body.len()) as u64
    }

    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let head = serde_json::to_vec(&self.head)?;
        let length = u32::try_from(head.len()).map_err(io::Error::other)?;
        let length = length.to_le_bytes();
        let mut sum = crc32fast::Hasher::new();
        for part in [&length, &*head, &*self.body] {
            sum.update(part);
        }
        out.write_all(MAGIC)?;
        out.write_all(&sum.finalize().to_le_bytes())?;
        for part in [&length, &*head, &*self.body] {
            out.write_all(part)?;
        }
        Ok(())
    }

    /// The request in a file; `None` if the file is not as it was written.
    pub(super) fn read(content: &Bytes) -> Option<Self> {
        let (magic, rest) = content.split_first_chunk::<8>()?;
        let (sum, checked) = rest.split_first_chunk::<4>()?;
        if magic != MAGIC || crc32fast::hash(checked) != u32::from_le_bytes(*sum) {
            return None;
        }
        let (length, _) = checked.split_first_chunk::<4>()?;
        let body = usize::try_from(u32::from_le_bytes(*length))
            .ok()?
            .checked_add(HEAD)?;
        let head = serde_json::from_slice(content.get(HEAD..body)?).ok()?;
        Some(Self {
            head,
            body: content.slice(body..),
        })
    }
}

const _: () = assert!(HEAD == CHECKED + 4);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_as_written_or_not_at_all() {
        let item = Item {
            head: Head {
                format: "pyroscope pprof".to_owned(),
                target: "/ingest?name=web".to_owned(),
                gzip: true,
            },
            body: Bytes::from_static(b"body"),
        };
        let mut content = Vec::new();
        item.write(&mut content).unwrap();
        assert_eq!(Item::read(&content.clone().into()), Some(item));
        for at in 0..content.len() {
            let mut broken = content.clone();
            broken[at] ^= 0x10;
            assert_eq!(Item::read(&broken.into()), None, "byte {at}");
            let cut = content[..at].to_vec();
            assert_eq!(Item::read(&cut.into()), None, "{at} bytes");
        }
        content.push(0);
        assert_eq!(Item::read(&content.into()), None);
    }
}
