//! Profiles that the tests of the writers share.

use std::sync::Arc;

use crate::profile::CounterKind;
use crate::profile::Function;
use crate::profile::FunctionKind;
use crate::profile::Labels;
use crate::profile::LocationId;
use crate::profile::Metadata;
use crate::profile::Profile;

/// Builds profiles from short notations.
#[derive(Default)]
pub(super) struct Builder {
    pub(super) profile: Profile,
}

impl Builder {
    /// Samples of a stack, outermost frame first. A frame is `label:line` of
    /// a Ruby function, `label:c` of a C function, `label:n` of machine code,
    /// `label:k` of the kernel, `label:m` of a marker; a file may follow after
    /// `@`, and a first line after another `:`.
    pub(super) fn sample(&mut self, tid: u32, frames: &[&str], count: u64) {
        let mut ids: Vec<LocationId> = frames.iter().map(|f| self.location(f)).collect();
        ids.reverse();
        let stack = self.profile.intern_stack(&ids);
        let labels = self.profile.intern_labels(&Labels {
            pid: 4242,
            tid,
            comm: Some(Arc::from("ruby")),
            thread_name: (tid != 4242).then(|| Arc::from(format!("worker {tid}"))),
            state: None,
        });
        self.profile.add(stack, labels, count);
    }

    fn location(&mut self, frame: &str) -> LocationId {
        let (frame, given) =
            (frame.split_once('@')).map_or((frame, None), |(frame, file)| (frame, Some(file)));
        let file = given.unwrap_or("/app/a.rb");
        let (label, line) = frame.rsplit_once(':').unwrap();
        let (file, first_line) = file.rsplit_once(':').unwrap_or((file, "1"));
        let (kind, file) = match line {
            "c" => (FunctionKind::CFunction, given.unwrap_or("<cfunc>")),
            "n" => (FunctionKind::Native, given.unwrap_or("")),
            "k" => (FunctionKind::Kernel, "[kernel.kallsyms]"),
            "m" => (FunctionKind::Marker, ""),
            _ => (FunctionKind::Ruby, file),
        };
        let has_lines = kind == FunctionKind::Ruby;
        let base = label.rsplit(['#', '.', ' ']).next().unwrap_or(label);
        let function = self.profile.intern_function(&Arc::new(Function {
            kind,
            label: Arc::from(label),
            base_label: Arc::from(base),
            file: Arc::from(file),
            first_line: if has_lines {
                first_line.parse().unwrap()
            } else {
                0
            },
        }));
        let line = if has_lines { line.parse().unwrap() } else { 0 };
        self.profile.intern_location(function, line)
    }
}

/// A small profile with a bit of everything: 100 samples.
pub(super) fn profile() -> Profile {
    let mut builder = Builder {
        profile: Profile::new(metadata()),
    };
    let main = "<main>:40@/app/bin/shop:1";
    let run = "Shop::Server#run:14@/app/lib/shop/server.rb:10";
    let block = "block in Shop::Server#run:15@/app/lib/shop/server.rb:14";
    let total = "Shop::Order#total:31@/app/lib/shop/order.rb:30";
    let fib = "Shop.fib:5@/app/lib/shop.rb:4";
    let map = "Array#map:c";
    let loop_ = "Kernel#loop:c";
    builder.sample(4242, &[main, run, loop_, block, total, map], 40);
    builder.sample(4242, &[main, run, loop_, block, total], 20);
    builder.sample(4243, &[block, fib, fib, fib], 30);
    builder.sample(4243, &[block, fib, fib], 3);
    builder.sample(4243, &["[stack truncated]:m", fib, fib, map], 7);
    builder.profile
}

pub(super) fn metadata() -> Metadata {
    let mut metadata = Metadata {
        start_unix_ns: 1_700_000_000_000_000_000,
        duration_ns: 10_000_000_000,
        frequency_hz: 99,
        command: "puma 6.4 [shop]".to_owned(),
        pids: vec![4242],
        tool: "rbprof 0.1.0".to_owned(),
        kernel: "6.1.0-18-amd64".to_owned(),
        rubies: vec!["3.3.8".to_owned()],
        comments: vec!["release 42".to_owned()],
        warnings: vec!["libfoo.so has no symbols".to_owned()],
        ..Metadata::default()
    };
    metadata.count("samples due", CounterKind::Account, 102);
    metadata.count("samples lost", CounterKind::Loss, 2);
    metadata.count("stacks truncated", CounterKind::Loss, 7);
    metadata.count("names not read", CounterKind::Loss, 0);
    metadata
}
