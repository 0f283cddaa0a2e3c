//! The functions of `.eh_frame` or `.debug_frame`, and what their instructions
//! say.

use gimli::BaseAddresses;
use gimli::CieOrFde;
use gimli::UnwindContext;
use gimli::UnwindSection;
use rbprof_common::unwind::Rule;
use rbprof_common::unwind::saved;

use super::builder::Builder;
use super::recognized::Recognized;
use super::rules::Bytes;
use super::rules::Columns;
use super::rules::Reader;
use super::rules::Reason;

/// Most functions taken from one file.
const MAX_FUNCTIONS: usize = 1 << 20;
/// Instructions executed, in bytes for each byte of the section. The first ones
/// of each function are shared and executed again for each: real files come to
/// 2, and only hostile ones share long ones.
const MAX_INSTRUCTIONS: usize = 4;
/// The same for small sections.
const MIN_INSTRUCTIONS: usize = 1 << 16;

/// Something with rules.
struct Function {
    start: u64,
    end: u64,
    what: What,
}

enum What {
    /// Described at that offset of the section.
    Described(usize),
    Recognized(Rule),
}

/// Compiles all functions of a section of `length` bytes that are in `text`, and
/// what was recognized of the rest. `false` if there is no function.
pub(super) fn compile<'a, S: UnwindSection<Bytes<'a>>>(
    section: &S,
    bases: &BaseAddresses,
    length: usize,
    columns: Columns,
    text: &[(u64, u64)],
    recognized: &[Recognized],
    builder: &mut Builder,
) -> bool {
    let mut functions = functions(section, bases, text);
    if functions.is_empty() {
        return false;
    }
    builder.statistics.functions = functions.len() as u32;
    functions.sort_by_key(|it| it.start);
    let described = functions.len();
    for it in recognized {
        let after = functions.get(..described).map_or(0, |all| {
            all.partition_point(|other| other.start <= it.start)
        });
        let next = functions.get(after).filter(|_| after < described);
        functions.push(Function {
            start: it.start,
            end: next.map_or(it.end, |next| it.end.min(next.start)),
            what: What::Recognized(it.rule),
        });
    }
    // Of two that begin at the same place, the described one comes first.
    functions.sort_by_key(|it| it.start);
    let mut compiler = Compiler {
        section,
        bases,
        columns,
        context: UnwindContext::new(),
        left: length
            .saturating_mul(MAX_INSTRUCTIONS)
            .max(MIN_INSTRUCTIONS),
        builder,
    };
    let mut at = 0;
    for function in functions {
        // Where functions overlap, the one that begins first has it.
        let start = function.start.max(at);
        if start >= function.end {
            continue;
        }
        at = function.end;
        let end = match function.what {
            _ if compiler.builder.is_full() => {
                compiler.leave_out(start, function.end, Reason::Limit);
                continue;
            }
            What::Described(offset) => compiler.function(offset, start, function.end),
            What::Recognized(rule) => {
                let statistics = &mut compiler.builder.statistics;
                statistics.recognized = statistics.recognized.saturating_add(1);
                compiler.builder.put(start, function.end, rule);
                Ok(())
            }
        };
        if let Err((from, reason)) = end {
            compiler.leave_out(from, function.end, reason);
        }
        compiler.builder.end(function.end);
    }
    true
}

/// What was recognized of a file that describes nothing.
pub(super) fn put_recognized(recognized: &[Recognized], builder: &mut Builder) {
    let mut sorted = recognized.to_vec();
    sorted.sort_by_key(|it| it.start);
    let mut at = 0;
    for it in sorted {
        let start = it.start.max(at);
        if start >= it.end {
            continue;
        }
        at = it.end;
        builder.statistics.recognized = builder.statistics.recognized.saturating_add(1);
        builder.put(start, it.end, it.rule);
        builder.end(it.end);
    }
}

/// The functions that a section describes.
fn functions<'a, S: UnwindSection<Bytes<'a>>>(
    section: &S,
    bases: &BaseAddresses,
    text: &[(u64, u64)],
) -> Vec<Function> {
    let mut functions = Vec::new();
    let mut entries = section.entries(bases);
    while functions.len() < MAX_FUNCTIONS {
        let Ok(Some(entry)) = entries.next() else {
            break;
        };
        let CieOrFde::Fde(partial) = entry else {
            continue;
        };
        let Ok(fde) = partial.parse(S::cie_from_offset) else {
            continue;
        };
        let start = fde.initial_address();
        // Also leaves out functions that the linker dropped, which are at 0.
        let Some((_, limit)) = text
            .iter()
            .find(|(first, end)| (*first..*end).contains(&start))
        else {
            continue;
        };
        let end = start.saturating_add(fde.len()).min(*limit);
        if start < end {
            functions.push(Function {
                start,
                end,
                what: What::Described(fde.offset()),
            });
        }
    }
    functions
}

struct Compiler<'c, S> {
    section: &'c S,
    bases: &'c BaseAddresses,
    columns: Columns,
    context: UnwindContext<usize>,
    /// Bytes of instructions that may still be executed.
    left: usize,
    builder: &'c mut Builder,
}

impl<'a, S: UnwindSection<Bytes<'a>>> Compiler<'_, S> {
    /// Compiles the function described at `offset`, from `start` to `end`. The
    /// error is from where on it cannot be done, and why.
    fn function(&mut self, offset: usize, start: u64, end: u64) -> Result<(), (u64, Reason)> {
        let mut at = start;
        let malformed = |at| move |_: gimli::Error| (at, Reason::Malformed);
        let fde = self
            .section
            .fde_from_offset(self.bases, S::Offset::from(offset), S::cie_from_offset)
            .map_err(malformed(at))?;
        let instructions = fde.entry_len().saturating_add(fde.cie().entry_len());
        self.left = self
            .left
            .checked_sub(instructions)
            .ok_or((at, Reason::Limit))?;
        let reader = Reader {
            section: self.section,
            encoding: fde.cie().encoding(),
            columns: self.columns,
            is_signal: fde.is_signal_trampoline(),
        };
        let mut rows = fde
            .rows(self.section, self.bases, &mut self.context)
            .map_err(malformed(at))?;
        while let Some(row) = rows.next_row().map_err(malformed(at))? {
            let from = row.start_address().max(at);
            let to = row.end_address().min(end);
            if from >= to {
                continue;
            }
            at = to;
            let statistics = &mut self.builder.statistics;
            statistics.described.rows = statistics.described.rows.saturating_add(1);
            statistics.described.text = statistics.described.text.saturating_add(to - from);
            let rule = reader.rule(row).unwrap_or_else(|reason| {
                statistics.count(reason, to - from);
                Rule::UNKNOWN
            });
            if rule.fp == saved::LOST {
                statistics.count(Reason::FramePointer, to - from);
            }
            self.builder.put(from, to, rule);
        }
        Ok(())
    }

    fn leave_out(&mut self, start: u64, end: u64, reason: Reason) {
        let text = end.saturating_sub(start);
        let statistics = &mut self.builder.statistics;
        statistics.described.text = statistics.described.text.saturating_add(text);
        statistics.count(reason, text);
        self.builder.put(start, end, Rule::UNKNOWN);
    }
}
