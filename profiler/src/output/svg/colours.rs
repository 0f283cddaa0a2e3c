//! Colours by kind of function.

use std::hash::Hasher;

use inferno::flamegraph::color::Color;

use crate::profile::Function;
use crate::profile::FunctionKind;

/// A kind of frame as the legend shows it.
pub(super) struct Kind {
    pub(super) kind: FunctionKind,
    pub(super) name: &'static str,
    /// Light enough for black text, far enough from the other kinds also for
    /// readers who confuse red and green.
    base: (u8, u8, u8),
    /// How much the colour varies from function to function, so that
    /// neighbours can be told apart.
    spread: (u8, u8, u8),
}

/// All kinds, in the order of the legend.
pub(super) const KINDS: [Kind; 5] = [
    Kind {
        kind: FunctionKind::Ruby,
        name: "Ruby",
        base: (226, 92, 78),
        spread: (24, 66, 42),
    },
    Kind {
        kind: FunctionKind::CFunction,
        name: "C",
        base: (240, 190, 60),
        spread: (12, 36, 48),
    },
    Kind {
        kind: FunctionKind::Native,
        name: "native",
        base: (104, 164, 214),
        spread: (48, 36, 24),
    },
    Kind {
        kind: FunctionKind::Kernel,
        name: "kernel",
        base: (172, 140, 206),
        spread: (36, 36, 24),
    },
    Kind {
        kind: FunctionKind::Marker,
        name: "unknown",
        base: (178, 178, 178),
        spread: (0, 0, 0),
    },
];

impl Kind {
    /// The colour in the middle of the kind's range.
    pub(super) fn middle(&self) -> Color {
        self.at(128)
    }

    fn at(&self, place: u8) -> Color {
        let channel = |base: u8, spread: u8| {
            let offset = u16::from(spread) * u16::from(place) / 255;
            base.saturating_add(u8::try_from(offset).unwrap_or(u8::MAX))
        };
        Color {
            r: channel(self.base.0, self.spread.0),
            g: channel(self.base.1, self.spread.1),
            b: channel(self.base.2, self.spread.2),
        }
    }
}

/// The colour of a function: the same in every flame graph.
pub(super) fn of(function: &Function) -> Color {
    let mut hash = Fnv::default();
    hash.write(function.label.as_bytes());
    hash.write(function.file.as_bytes());
    let [place, ..] = hash.finish().to_be_bytes();
    KINDS
        .iter()
        .find(|kind| kind.kind == function.kind)
        .map_or(ALL, |kind| kind.at(place))
}

/// The colour of the frame under all others.
pub(super) const ALL: Color = Color {
    r: 222,
    g: 222,
    b: 222,
};

/// The colour behind the frames.
pub(super) const BACKGROUND: Color = Color {
    r: 250,
    g: 250,
    b: 250,
};

/// FNV-1a: the standard library's hash may change with its version.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for Fnv {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn finish(&self) -> u64 {
        // The low bits of FNV are its weak ones; mix them into the high ones.
        (self.0 ^ self.0 >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    }
}
