//! What a process has mapped: `/proc/PID/maps`.

use rbprof_common::process::Range;

/// One line of `/proc/PID/maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The addresses.
    pub range: Range,
    /// May be read.
    pub readable: bool,
    /// May be written.
    pub writable: bool,
    /// May be executed.
    pub executable: bool,
    /// Where in the file it starts.
    pub offset: u64,
    /// Which file; `None` for memory without one.
    pub file: Option<FileId>,
    /// The path in the process's mount namespace, or a name in brackets, or
    /// nothing. Any bytes.
    pub path: Vec<u8>,
    /// The file has no name any more.
    pub deleted: bool,
}

/// A file as `/proc/PID/maps` identifies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Major device number.
    pub major: u32,
    /// Minor device number.
    pub minor: u32,
    /// Inode number.
    pub inode: u64,
}

impl Mapping {
    /// Reads all of `/proc/PID/maps`; lines that make no sense are left out.
    #[must_use]
    pub fn parse_all(maps: &[u8]) -> Vec<Self> {
        maps.split(|&byte| byte == b'\n')
            .filter_map(Self::parse)
            .collect()
    }

    fn parse(line: &[u8]) -> Option<Self> {
        let mut rest = line;
        let [addresses, permissions, offset, device, inode] =
            std::array::from_fn(|_| next_field(&mut rest));
        let (start, end) = addresses.split_once('-')?;
        let (major, minor) = device.split_once(':')?;
        let inode = inode.parse().ok()?;
        let permission = |at: usize, letter| permissions.as_bytes().get(at) == Some(&letter);
        let path = unescape(rest.trim_ascii_start());
        let (path, deleted) = match path.strip_suffix(b" (deleted)") {
            Some(path) => (path.to_vec(), true),
            None => (path, false),
        };
        Some(Self {
            range: Range {
                start: hexadecimal(start)?,
                end: hexadecimal(end)?,
            },
            readable: permission(0, b'r'),
            writable: permission(1, b'w'),
            executable: permission(2, b'x'),
            offset: hexadecimal(offset)?,
            file: (inode != 0).then_some(FileId {
                major: u32::from_str_radix(major, 16).ok()?,
                minor: u32::from_str_radix(minor, 16).ok()?,
                inode,
            }),
            path,
            deleted,
        })
    }

    /// The path for messages.
    #[must_use]
    pub fn display_path(&self) -> String {
        String::from_utf8_lossy(&self.path).into_owned()
    }
}

/// Takes the next field off the front, and one space behind it. The empty
/// string stands for one that is missing or not text.
fn next_field<'a>(rest: &mut &'a [u8]) -> &'a str {
    let line = rest.trim_ascii_start();
    let end = line
        .iter()
        .position(|&byte| byte == b' ')
        .unwrap_or(line.len());
    let (field, behind) = line.split_at_checked(end).unwrap_or((line, &[]));
    *rest = behind;
    std::str::from_utf8(field).unwrap_or_default()
}

fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

/// The kernel writes a newline in a path as `\012` and nothing else so.
fn unescape(path: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((&byte, behind)) = rest.split_first() {
        if let Some(behind) = rest.strip_prefix(b"\\012") {
            plain.push(b'\n');
            rest = behind;
        } else {
            plain.push(byte);
            rest = behind;
        }
    }
    plain
}

/// A file that is mapped, with its mappings in the order of their addresses.
#[derive(Clone, Debug)]
pub struct MappedFile<'a> {
    /// Which file.
    pub id: FileId,
    /// Where it is mapped; never empty.
    pub mappings: Vec<&'a Mapping>,
}

impl<'a> MappedFile<'a> {
    /// The mapped files, in the order of their first addresses.
    #[must_use]
    pub fn all(mappings: &'a [Mapping]) -> Vec<Self> {
        let mut files: Vec<Self> = Vec::new();
        let mut positions = std::collections::HashMap::new();
        for mapping in mappings {
            let Some(id) = mapping.file else { continue };
            let position = *positions.entry(id).or_insert(files.len());
            match files.get_mut(position) {
                Some(file) => file.mappings.push(mapping),
                None => files.push(Self {
                    id,
                    mappings: vec![mapping],
                }),
            }
        }
        files
    }

    /// Whether any of it may be executed.
    #[must_use]
    pub fn is_executable(&self) -> bool {
        self.mappings.iter().any(|mapping| mapping.executable)
    }

    /// The path, in the process's mount namespace.
    #[must_use]
    pub fn path(&self) -> &'a [u8] {
        self.mappings.first().map_or(&[], |mapping| &mapping.path)
    }

    /// The path for messages.
    #[must_use]
    pub fn display_path(&self) -> String {
        String::from_utf8_lossy(self.path()).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_with_any_path() {
        let maps = b"7f3b25800000-7f3b25833000 r-xp 00033000 fe:1f 15695890                   /usr/lib/lib ruby\xff\\012.so (deleted)\n\
            7f3b25c0b000-7f3b25c0f000 rw-p 00000000 00:00 0 \n\
            nonsense\n\
            7ffcc5e75000-7ffcc6674000 rw-p 00000000 00:00 0                          [stack]\n";
        let all = Mapping::parse_all(maps);
        assert_eq!(all.len(), 3);
        assert_eq!(
            all[0],
            Mapping {
                range: Range {
                    start: 0x7f3b_2580_0000,
                    end: 0x7f3b_2583_3000
                },
                readable: true,
                writable: false,
                executable: true,
                offset: 0x33000,
                file: Some(FileId {
                    major: 0xfe,
                    minor: 0x1f,
                    inode: 15_695_890
                }),
                path: b"/usr/lib/lib ruby\xff\n.so".to_vec(),
                deleted: true,
            }
        );
        assert_eq!((all[1].file, all[1].path.len()), (None, 0));
        assert_eq!(all[2].path, b"[stack]");
    }

    #[test]
    fn mappings_of_one_file_come_together() {
        let maps = b"1000-2000 r--p 00000000 00:01 5 /a\n\
            2000-3000 rw-p 00000000 00:00 0 \n\
            3000-4000 r--p 00000000 00:01 6 /b\n\
            4000-5000 r-xp 00001000 00:01 5 /a\n";
        let mappings = Mapping::parse_all(maps);
        let files = MappedFile::all(&mappings);
        let shape: Vec<_> = files
            .iter()
            .map(|file| (file.path(), file.mappings.len(), file.is_executable()))
            .collect();
        assert_eq!(shape, [(&b"/a"[..], 2, true), (&b"/b"[..], 1, false)]);
    }
}
