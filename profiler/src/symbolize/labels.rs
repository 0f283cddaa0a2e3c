//! Labels, as Ruby 3.4 composes them for its backtraces.
//!
//! The rules are those of `calculate_iseq_label` and `rb_gen_method_name` in
//! Ruby 3.4's `vm_backtrace.c`; older Rubies hold all that they need.

use std::sync::Arc;

use rbprof_common::layout::NameLayout;

use super::classes::Owner;
use super::evidence::Reader;
use super::evidence::Unreadable;
use super::iseq::Iseq;
use super::iseq::IseqType;
use crate::memory::TargetMemory;

/// Sequences looked at for one label: the depth of blocks in blocks.
const MAX_NESTING: u32 = 256;

/// A method's name with the class it belongs to, if that has a name.
pub(super) fn method_name(owner: Option<&Owner>, name: &str) -> String {
    match owner {
        Some(Owner {
            path,
            singleton: true,
        }) => format!("{path}.{name}"),
        Some(Owner {
            path,
            singleton: false,
        }) => format!("{path}#{name}"),
        None => name.to_owned(),
    }
}

/// The code a label names, and what stands before the name.
#[derive(Debug)]
pub(super) struct Labelled {
    /// How many blocks the frame is inside of its method, class or file.
    levels: u32,
    /// The method, class or file.
    named: Iseq,
}

impl Labelled {
    /// Finds what a frame of `iseq` is labelled with.
    pub(super) fn find<M: TargetMemory>(
        reader: &mut Reader<'_, M>,
        layout: &NameLayout,
        iseq: Iseq,
    ) -> Result<Self, Unreadable> {
        let mut iseq = iseq;
        for _ in 0..MAX_NESTING {
            match iseq.kind {
                IseqType::Top | IseqType::Class | IseqType::Main | IseqType::Method => {
                    return Ok(Self {
                        levels: 0,
                        named: iseq,
                    });
                }
                IseqType::Block | IseqType::Plain => {
                    return Self::find_around_block(reader, layout, iseq);
                }
                // Named like the code they stand in.
                IseqType::Rescue | IseqType::Ensure | IseqType::Eval => {
                    if iseq.parent == 0 {
                        return Ok(Self {
                            levels: 0,
                            named: iseq,
                        });
                    }
                    iseq = Iseq::read(reader, layout, iseq.parent)?;
                }
            }
        }
        Err(Unreadable)
    }

    fn find_around_block<M: TargetMemory>(
        reader: &mut Reader<'_, M>,
        layout: &NameLayout,
        block: Iseq,
    ) -> Result<Self, Unreadable> {
        let mut iseq = block;
        let mut levels = 0;
        for _ in 0..MAX_NESTING {
            if iseq.parent == 0 || iseq.address == block.local {
                return Ok(Self {
                    levels: levels.max(1),
                    named: iseq,
                });
            }
            if iseq.kind == IseqType::Block {
                levels += 1;
            }
            iseq = Iseq::read(reader, layout, iseq.parent)?;
        }
        Err(Unreadable)
    }

    /// The label, given the class of the frame's method.
    pub(super) fn label<M: TargetMemory>(
        &self,
        reader: &mut Reader<'_, M>,
        layout: &NameLayout,
        owner: Option<&Owner>,
    ) -> Result<String, Unreadable> {
        let name: Arc<str> = self.named.label(reader, layout)?;
        let name = match self.named.kind {
            IseqType::Method => method_name(owner, &name),
            _ => name.as_ref().to_owned(),
        };
        Ok(match self.levels {
            0 => name,
            1 => format!("block in {name}"),
            levels => format!("block ({levels} levels) in {name}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_are_named_with_their_class() {
        let owner = |singleton| Owner {
            path: "A::B".into(),
            singleton,
        };
        assert_eq!(method_name(Some(&owner(false)), "c"), "A::B#c");
        assert_eq!(method_name(Some(&owner(true)), "c"), "A::B.c");
        assert_eq!(method_name(None, "c"), "c");
    }
}
