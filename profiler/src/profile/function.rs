//! What a frame is called.

use std::sync::Arc;

/// Where a function's code comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FunctionKind {
    /// Written in Ruby.
    Ruby,
    /// A Ruby method written in C.
    CFunction,
    /// Machine code of the process.
    Native,
    /// Machine code of the kernel.
    Kernel,
    /// Not code: says what could not be known, such as where a stack was cut.
    Marker,
}

/// A function as an output shows it. Names that are not valid UTF-8 have the
/// offending bytes written as `\xNN`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Function {
    /// Where its code comes from.
    pub kind: FunctionKind,
    /// The full label, as Ruby 3.4 prints it: `block in Foo::Bar#baz`.
    pub label: Arc<str>,
    /// The method's own name: `baz`.
    pub base_label: Arc<str>,
    /// Absolute path, or the path Ruby has (`(eval at a.rb:3)`,
    /// `<internal:kernel>`), or `<cfunc>`; never a word for "unknown".
    pub file: Arc<str>,
    /// First line of the definition; 0 where there is none.
    pub first_line: u32,
}

impl Function {
    /// A frame that says what could not be known.
    #[must_use]
    pub fn marker(label: &str) -> Arc<Self> {
        let label: Arc<str> = label.into();
        Arc::new(Self {
            kind: FunctionKind::Marker,
            base_label: Arc::clone(&label),
            label,
            file: "".into(),
            first_line: 0,
        })
    }
}
