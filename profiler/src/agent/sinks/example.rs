//! Profiles that the tests of the sinks share.

use std::sync::Arc;
use std::time::Duration;
use std::time::UNIX_EPOCH;

use crate::agent::batch::Batch;
use crate::agent::identity::Identity;
use crate::profile::CounterKind;
use crate::profile::Function;
use crate::profile::FunctionKind;
use crate::profile::Labels;
use crate::profile::LocationId;
use crate::profile::Mapping;
use crate::profile::Metadata;
use crate::profile::Profile;

fn function(profile: &mut Profile, kind: FunctionKind, label: &str) -> crate::profile::FunctionId {
    profile.intern_function(&Arc::new(Function {
        kind,
        label: label.into(),
        base_label: label.rsplit('#').next().unwrap_or(label).into(),
        file: "/app/a.rb".into(),
        first_line: 3,
    }))
}

/// `count` samples of a Ruby method that is in a system call.
pub(super) fn batch(service: &str, pid: u32, count: u64) -> Batch {
    let mut profile = Profile::new(Metadata {
        start_unix_ns: 1_700_000_000_250_000_000,
        duration_ns: 1_500_000_000,
        frequency_hz: 19,
        pids: vec![pid],
        rubies: vec!["3.3.8".to_owned()],
        ..Metadata::default()
    });
    profile.metadata.count("samples lost", CounterKind::Loss, 3);
    let p = &mut profile;
    let main = function(p, FunctionKind::Ruby, "<main>");
    let work = function(p, FunctionKind::Ruby, "Shop#work");
    let read = function(p, FunctionKind::CFunction, "IO#read");
    let native = function(p, FunctionKind::Native, "rb_io_read");
    let kernel = function(p, FunctionKind::Kernel, "vfs_read");
    let libruby = p.intern_mapping(&Mapping {
        start: 0x7000,
        limit: 0x9000,
        offset: 0x1000,
        file: "/usr/lib/libruby.so".into(),
        build_id: "abcdef".into(),
        ..Mapping::default()
    });
    let mut frames: Vec<LocationId> = vec![
        p.intern_location(main, 10),
        p.intern_compiled_location(work, 4),
        p.intern_location(read, 0),
        p.intern_native_location(native, 0, libruby, 0x7123),
        p.intern_native_location(kernel, 0, crate::profile::MappingId::RUBY, 0),
    ];
    frames.reverse();
    let stack = p.intern_stack(&frames);
    let labels = p.intern_labels(&Labels {
        pid,
        tid: pid,
        thread_name: Some("main thread".into()),
        comm: Some("ruby".into()),
        state: None,
    });
    p.add(stack, labels, count);
    Batch {
        service: service.into(),
        process: Some(Arc::new(Identity {
            pid,
            service: service.into(),
            command: "ruby app.rb --port 80".to_owned(),
            container: Some("c0ffee".to_owned()),
            pod: Some("11-22".to_owned()),
            unit: Some("shop.service".to_owned()),
            cgroup: Some("/system.slice/shop.service".to_owned()),
            ruby: "3.3.8".to_owned(),
            ..Identity::default()
        })),
        from: UNIX_EPOCH + Duration::from_nanos(1_700_000_000_250_000_000),
        until: UNIX_EPOCH + Duration::from_nanos(1_700_000_001_750_000_000),
        profile: Arc::new(profile),
    }
}
