//! Whether the native frames of a recorded stack can be what they are said to
//! be, by what the files themselves say: gimli's reading of their call frame
//! information, and the instructions before each return address.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::fs::File;
use std::io::Read as _;
use std::io::Seek as _;
use std::os::unix::fs::FileExt as _;

use anyhow::Context as _;
use anyhow::Result;
use iced_x86::Decoder;
use iced_x86::DecoderOptions;
use iced_x86::Mnemonic;
use object::Object as _;
use object::ObjectSection as _;
use object::ObjectSymbol as _;
use rbprof::native::objects::Objects;
use rbprof_common::wire::Frame;
use rbprof_common::wire::frame_attr;
use rbprof_common::wire::frame_kind;
use rbprof_common::wire::object as objects;
use rbprof_common::wire::sample_flags;

use crate::cfi::Caller;
use crate::cfi::Cfi;
use crate::cfi::Described;
use crate::cfi::Frame as Undefined;
use crate::recording::Seen;

/// Longest call instruction, bytes: prefixes, opcode, and an operand in memory.
const MAX_CALL: usize = 9;
/// Activations that a thread can be entering or leaving at once.
const MAX_SURPLUS: usize = 2;

/// What is wrong with a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Defect {
    /// Native and Ruby frames did not fit together, and could not be put in
    /// order.
    Unmatched,
    /// A control frame of no known type.
    UnknownFrame,
    /// Not as many activations of the interpreter as frames that end one, or the
    /// two are not next to each other.
    Activations,
    /// A frame where nothing known is mapped.
    Nowhere,
    /// A frame that is not in the code of its file, or a caller that is in no
    /// function, as far as the file says.
    NoFunction,
    /// A caller that is not after a call.
    NoCall,
}

/// Where a native stack ends.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// In a function that has no caller, by what its file says of it.
    Start(String),
    /// In a function whose return address is 0. The first function of a fiber is
    /// such a one.
    Zero(String),
    /// Somewhere else, and why.
    Cut(String),
}

struct Image {
    name: String,
    cfi: Option<Cfi<'static>>,
    /// In the order of their addresses.
    functions: Vec<Described>,
    /// The sections of code.
    code: Vec<(u64, &'static [u8])>,
    /// Start, end and name of functions.
    symbols: Vec<(u64, u64, String)>,
    entry: u64,
}

impl Image {
    fn read(path: &str, file: &File) -> Result<Self> {
        let mut data = Vec::new();
        let mut file = file;
        file.rewind()?;
        file.read_to_end(&mut data)?;
        let data: &'static [u8] = data.leak();
        let file = object::File::parse(data)?;
        let cfi = Cfi::of(&file).ok();
        let mut functions = cfi.as_ref().map_or(Ok(Vec::new()), Cfi::functions)?;
        functions.sort_unstable_by_key(|function| function.start);
        let code = file
            .sections()
            .filter(|section| section.kind() == object::SectionKind::Text)
            .map(|section| Ok((section.address(), section.data()?)))
            .collect::<Result<_>>()?;
        let symbols = file
            .symbols()
            .chain(file.dynamic_symbols())
            .filter(|symbol| symbol.kind() == object::SymbolKind::Text)
            .map(|symbol| {
                let name = symbol.name().unwrap_or_default().to_owned();
                let end = symbol.address().saturating_add(symbol.size().max(1));
                (symbol.address(), end, name)
            })
            .collect();
        Ok(Self {
            name: path.rsplit('/').next().unwrap_or(path).to_owned(),
            cfi,
            functions,
            code,
            symbols,
            entry: file.entry(),
        })
    }

    fn function(&self, address: u64) -> Option<&Described> {
        let after = self
            .functions
            .partition_point(|function| function.start <= address);
        let function = self.functions.get(after.checked_sub(1)?)?;
        (address < function.end).then_some(function)
    }

    fn symbol(&self, address: u64) -> Option<&str> {
        let mut symbols = self.symbols.iter();
        let found = symbols.find(|(start, end, _)| (*start..*end).contains(&address))?;
        Some(&found.2)
    }

    fn has_code(&self, address: u64) -> bool {
        let mut sections = self.code.iter();
        sections.any(|(start, code)| address.wrapping_sub(*start) < code.len() as u64)
    }

    /// The code up to that address.
    fn code_before(&self, end: u64) -> Option<&[u8]> {
        self.code.iter().find_map(|(start, code)| {
            let length = usize::try_from(end.checked_sub(*start)?).ok()?;
            let before = code.get(..length)?;
            Some(
                before
                    .get(length.saturating_sub(MAX_CALL)..)
                    .unwrap_or(before),
            )
        })
    }

    fn place(&self, address: u64) -> String {
        let name = self.symbol(address);
        // Without a name, the function's address has to do.
        let start = self.function(address).map(|function| function.start);
        match (name, start) {
            (Some(name), _) => format!("{} {name}", self.name),
            (None, Some(start)) => format!("{} {start:#x}", self.name),
            (None, None) => format!("{} +{address:#x}", self.name),
        }
    }
}

/// What a process has mapped.
pub struct Code {
    images: HashMap<u32, Image>,
    memory: File,
    /// Whether a return address follows a call.
    calls: HashMap<(u32, u64), bool>,
}

impl Code {
    /// The files of a recording, and the memory of its process, which must still
    /// be there.
    ///
    /// # Errors
    /// If one cannot be read.
    pub fn of(pid: u32, found: &Objects) -> Result<Self> {
        let mut images = HashMap::new();
        for (number, object) in found.all() {
            let image =
                Image::read(&object.path, &*object.file()?).with_context(|| object.path.clone())?;
            images.insert(number, image);
        }
        Ok(Self {
            images,
            memory: File::open(format!("/proc/{pid}/mem"))?,
            calls: HashMap::new(),
        })
    }

    /// What is wrong with a stack; nothing if all of it can be as it is said.
    ///
    /// What is not there is not wrong, see [`Code::end`].
    pub fn defects(&mut self, seen: &Seen) -> BTreeMap<Defect, String> {
        let mut defects = BTreeMap::new();
        if seen.stack_flags & sample_flags::UNMATCHED != 0 {
            defects.insert(Defect::Unmatched, String::new());
        }
        if seen.flags & sample_flags::UNKNOWN_FRAME != 0 {
            defects.insert(Defect::UnknownFrame, String::new());
        }
        if let Some(why) = wrong_activations(seen) {
            defects.insert(Defect::Activations, why);
        }
        let mut inner: Option<Frame> = None;
        for &frame in native(seen) {
            if let Some(defect) = self.defect(frame, inner) {
                let inner = inner.map_or_else(String::new, |inner| self.place(inner));
                let place = format!("{} calls {inner}", self.place(frame));
                defects.entry(defect).or_insert(place);
            }
            inner = Some(frame);
        }
        defects
    }

    fn defect(&mut self, frame: Frame, inner: Option<Frame>) -> Option<Defect> {
        let (number, address) = (frame.object(), frame.pc);
        if number == objects::UNKNOWN {
            return Some(Defect::Nowhere);
        }
        if number != objects::ANONYMOUS {
            let Some(image) = self.images.get(&number) else {
                return Some(Defect::Nowhere);
            };
            match image.function(address) {
                // Nothing calls it: it is looked up less one like a caller.
                Some(function) if function.is_trampoline => return None,
                Some(_) => {}
                // Handwritten code may have a symbol and no description.
                None if image.symbol(address).is_some() => {}
                // Where the thread itself stands needs no proof.
                None if inner.is_none() && image.has_code(address) => {}
                None => return Some(Defect::NoFunction),
            }
        }
        let inner = inner?;
        // Of what a signal interrupted, the address is that of the next
        // instruction.
        let interrupted = self
            .images
            .get(&inner.object())
            .and_then(|image| image.function(inner.pc))
            .is_some_and(|function| function.is_trampoline);
        if interrupted {
            return None;
        }
        (!self.is_after_call(number, address + 1)).then_some(Defect::NoCall)
    }

    fn is_after_call(&mut self, number: u32, address: u64) -> bool {
        if let Some(&known) = self.calls.get(&(number, address)) {
            return known;
        }
        let is_call = if number == objects::ANONYMOUS {
            let mut before = [0; MAX_CALL];
            let start = address.saturating_sub(MAX_CALL as u64);
            let read = self.memory.read_exact_at(&mut before, start);
            read.is_ok() && ends_with_call(&before)
        } else {
            let image = self.images.get(&number);
            let before = image.and_then(|image| image.code_before(address));
            before.is_some_and(ends_with_call)
        };
        self.calls.insert((number, address), is_call);
        is_call
    }

    /// Where the native stack ends.
    ///
    /// # Errors
    /// If a file's call frame information is malformed.
    pub fn end(&mut self, seen: &Seen) -> Result<End> {
        let Some(&outermost) = native(seen).next_back() else {
            return Ok(End::Cut(format!("no native frame ({:#x})", seen.flags)));
        };
        let place = self.place(outermost);
        let incomplete = sample_flags::NATIVE_CUT | sample_flags::TRUNCATED | sample_flags::FAULT;
        if seen.flags & incomplete != 0 {
            let why = [
                (sample_flags::NO_TABLE, "no table"),
                (sample_flags::UNMAPPED, "nothing mapped"),
                (sample_flags::TRUNCATED, "too long"),
                (sample_flags::FAULT, "unreadable"),
            ];
            let why = why.iter().find(|(flag, _)| seen.flags & flag != 0);
            let why = why.map_or("", |(_, why)| why);
            return Ok(End::Cut(format!("{place} +{:#x} {why}", outermost.pc)));
        }
        let Some(image) = self.images.get_mut(&outermost.object()) else {
            return Ok(End::Cut(place));
        };
        let nothing = Undefined {
            pc: 0,
            sp: 0,
            fp: 0,
            lr: 0,
        };
        let caller = match &mut image.cfi {
            Some(cfi) => cfi.caller(outermost.pc, &nothing, &|_| None)?,
            None => Caller::Undescribed,
        };
        // Of the entry point not every file says that nothing calls it.
        let is_entry = outermost.pc.wrapping_sub(image.entry) < 128;
        Ok(match caller {
            Caller::End => End::Start(place),
            Caller::Undescribed if is_entry => End::Start(place),
            _ => End::Zero(place),
        })
    }

    /// File and function of a frame.
    #[must_use]
    pub fn place(&self, frame: Frame) -> String {
        match (frame.object(), self.images.get(&frame.object())) {
            (_, Some(image)) => image.place(frame.pc),
            (objects::ANONYMOUS, _) => "compiled code".to_owned(),
            _ => format!("nowhere +{:#x}", frame.pc),
        }
    }
}

/// The native frames of a stack, leaf first.
fn native(seen: &Seen) -> impl DoubleEndedIterator<Item = &Frame> {
    let frames = seen.stack.iter();
    frames.filter(|frame| frame.kind() == frame_kind::NATIVE)
}

/// Whether a frame is one that Ruby has on its own stack.
#[must_use]
pub fn is_of_ruby(frame: &Frame) -> bool {
    !matches!(
        frame.kind(),
        frame_kind::NATIVE | frame_kind::KERNEL | frame_kind::COLLECTOR
    )
}

/// What does not fit between activations of the interpreter and the frames that
/// end one. A stack that was cut has fewer activations.
fn wrong_activations(seen: &Seen) -> Option<String> {
    let count = |of_ruby: bool| {
        let frames = seen.stack.iter();
        let of_kind = frames.filter(|frame| is_of_ruby(frame) == of_ruby);
        of_kind
            .filter(|frame| frame.has(frame_attr::FINISH))
            .count()
    };
    let (ruby, activations) = (count(true), count(false));
    let is_cut = seen.flags & sample_flags::NATIVE_CUT != 0;
    // A thread that is entering or leaving one has one more on one side.
    let united = seen.flags & sample_flags::UNMATCHED != 0;
    let fits = match ruby.abs_diff(activations) {
        0 => true,
        surplus if united => surplus <= MAX_SURPLUS,
        _ => is_cut && activations <= ruby,
    };
    if !fits {
        return Some(format!("{activations} activations, {ruby} of them end"));
    }
    // Each one's Ruby frames are right above it, and end with one that says so.
    let pairs = seen.stack.iter().zip(seen.stack.iter().skip(1));
    let mut apart = pairs.filter(|(inner, outer)| {
        let is_activation = !is_of_ruby(outer) && outer.has(frame_attr::FINISH);
        let ends_one = is_of_ruby(inner) && inner.has(frame_attr::FINISH);
        is_activation != ends_one
    });
    let apart = apart.next().filter(|_| !is_cut && !united);
    apart.map(|(inner, outer)| format!("{inner:x?} is followed by {outer:x?}"))
}

/// Whether the last of some code is a call instruction.
fn ends_with_call(code: &[u8]) -> bool {
    (2..=code.len()).any(|length| {
        let Some(bytes) = code.get(code.len() - length..) else {
            return false;
        };
        let mut decoder = Decoder::new(64, bytes, DecoderOptions::NONE);
        let instruction = decoder.decode();
        instruction.len() == length
            && !instruction.is_invalid()
            && instruction.mnemonic() == Mnemonic::Call
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_told_from_what_only_looks_like_one() {
        for call in [
            &[0xe8, 1, 2, 3, 4][..],
            &[0xff, 0xd0],
            &[0x41, 0xff, 0xd3],
            &[0xff, 0x15, 1, 2, 3, 4],
            &[0xff, 0x54, 0x24, 8],
            &[0x90, 0x90, 0xff, 0x50, 0x10],
        ] {
            assert!(ends_with_call(call), "{call:x?}");
        }
        for other in [
            // A jump, a call with one more instruction after it, a system call.
            &[0xe9, 1, 2, 3, 4][..],
            &[0xe8, 1, 2, 3, 4, 0x90],
            &[0x90, 0x0f, 0x05],
            &[0xff, 0xe0],
        ] {
            assert!(!ends_with_call(other), "{other:x?}");
        }
    }
}
