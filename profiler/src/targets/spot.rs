//! Whether a process runs Ruby at all: asked of every process on a machine, so
//! cheaper than finding out all about its Ruby.

use std::collections::HashMap;
use std::sync::Arc;

use super::mappings::FileId;
use super::mappings::MappedFile;
use super::mappings::Mapping;
use super::proc;
use super::ruby;
use super::ruby::NotFound;
use crate::memory::OpenError;
use crate::memory::PinError;
use crate::memory::PinnedProcess;
use crate::memory::ProcessMemory;

/// Most files remembered.
const MAX_FILES: usize = 1 << 16;

/// What is known of files: whether there is a Ruby in them.
#[derive(Debug, Default)]
pub struct Files(HashMap<FileId, bool>);

/// Whether there is a Ruby among the code that a process has mapped. A process
/// that is gone, or may not be looked at, runs none.
#[must_use]
pub fn runs_ruby(pid: u32, files: &mut Files) -> bool {
    let Ok(process) = PinnedProcess::open(pid) else {
        return false;
    };
    let process = Arc::new(process);
    // That of a thread of the kernel is empty.
    let Ok(mappings) = proc::mappings(&process) else {
        return false;
    };
    let mut memory = None;
    for file in MappedFile::all(&mappings) {
        if !file.is_executable() && !ruby::names_ruby(file.path()) {
            continue;
        }
        let known = files.0.get(&file.id).copied();
        let answer = known.unwrap_or_else(|| {
            if memory.is_none() {
                memory = ProcessMemory::open(Arc::clone(&process)).ok();
            }
            let Some(memory) = &memory else {
                return false;
            };
            let answer = judge(&process, memory, &file);
            if let Some(answer) = answer
                && files.0.len() < MAX_FILES
            {
                files.0.insert(file.id, answer);
            }
            answer.unwrap_or(false)
        });
        if answer {
            return true;
        }
    }
    false
}

/// Whether there is a Ruby in the file with this inode number, or else this name,
/// that a process has mapped. `None` if the process is gone, or has no such file
/// mapped (any more).
#[must_use]
pub fn is_ruby(pid: u32, inode: u64, name: &[u8]) -> Option<bool> {
    let process = match PinnedProcess::open(pid) {
        Ok(process) => Arc::new(process),
        Err(PinError::Gone) => return None,
        // Asking again would give the same answer.
        Err(_) => return Some(false),
    };
    let Ok(mappings) = proc::mappings(&process) else {
        return process.is_alive().then_some(false);
    };
    let memory = match ProcessMemory::open(Arc::clone(&process)) {
        Ok(memory) => memory,
        Err(OpenError::Gone) => return None,
        Err(_) => return process.is_alive().then_some(false),
    };
    let files = MappedFile::all(&mappings);
    // File systems in layers have other numbers inside than they show.
    let by_name = |file: &&MappedFile<'_>| {
        let path = file.path();
        path.rsplit(|&byte| byte == b'/').next() == Some(name)
    };
    let mut found = (files.iter())
        .filter(|file| file.id.inode == inode)
        .peekable();
    if found.peek().is_some() {
        return any(found.map(|file| judge(&process, &memory, file)));
    }
    any((files.iter().filter(by_name)).map(|file| judge(&process, &memory, file)))
}

/// One yes is enough; without any answer there is none.
fn any(answers: impl Iterator<Item = Option<bool>>) -> Option<bool> {
    answers.flatten().reduce(|a, b| a || b)
}

/// Whether there is a Ruby in a file. `None` if the process is gone.
fn judge(process: &PinnedProcess, memory: &ProcessMemory, file: &MappedFile<'_>) -> Option<bool> {
    let mappings: Vec<Mapping> = file.mappings.iter().copied().cloned().collect();
    match ruby::find(process, memory, &mappings, 0) {
        // What it says of itself may not be there yet.
        Ok(_) | Err(NotFound::Unreadable { .. }) => Some(true),
        Err(NotFound::Nowhere { .. } | NotFound::Unopened { .. }) => {
            process.is_alive().then_some(false)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_is_no_ruby() {
        let own = std::process::id();
        let mut files = Files::default();
        assert!(!runs_ruby(own, &mut files));
        assert!(!files.0.is_empty());
        let program = std::env::current_exe().unwrap();
        let name = program.file_name().unwrap().as_encoded_bytes();
        assert_eq!(is_ruby(own, u64::MAX, name), Some(false));
        assert_eq!(is_ruby(own, u64::MAX, b"no such file"), None);
    }

    #[test]
    fn one_yes_is_enough() {
        assert_eq!(any([None, Some(false), Some(true)].into_iter()), Some(true));
        assert_eq!(any([None, Some(false)].into_iter()), Some(false));
        assert_eq!(any([None].into_iter()), None);
    }
}
