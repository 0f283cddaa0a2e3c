//! Small numbers that stand for interned things.
//!
//! An id is valid in the [`Profile`](super::Profile) that handed it out, for as
//! long as that profile lives. In another profile it names something else, or
//! nothing: look-ups return `Option` and never panic.

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(u32);

        impl $name {
            /// The id as a place in a table: ids are dense and start at 0.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// The largest value stands for everything that does not fit: a
            /// table that long would need more memory than machines have.
            pub(super) fn from_index(index: usize) -> Self {
                Self(u32::try_from(index).unwrap_or(u32::MAX))
            }
        }
    };
}

id! {
    /// A [`Function`](super::Function).
    FunctionId
}
id! {
    /// A [`Mapping`](super::Mapping).
    MappingId
}
id! {
    /// A [`Location`](super::Location).
    LocationId
}
id! {
    /// A set of [`Labels`](super::Labels).
    LabelsId
}
id! {
    /// A stack; [`StackId::EMPTY`] is the one without frames.
    StackId
}

impl MappingId {
    /// The mapping of everything that is not machine code, in every profile.
    pub const RUBY: Self = Self(0);
    /// The mapping of Ruby code that a compiler of Ruby's has made machine code
    /// of, in every profile.
    pub const RUBY_JIT: Self = Self(1);
}

impl StackId {
    /// The stack without frames, in every profile.
    pub const EMPTY: Self = Self(0);
}
