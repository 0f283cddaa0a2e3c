//! What the path of a control group tells: container, unit, pod.
//!
//! The names are those that engines and systemd give their groups, with either
//! driver (`systemd`: slices and scopes; `cgroupfs`: plain directories), in the
//! hierarchies of version 1, of version 2, or both.

use super::MAX_CGROUPS;
use super::read_start;
use crate::memory::PinnedProcess;

/// Digits of a container's id, with every engine that numbers them.
const ID_DIGITS: usize = 64;
/// What engines put before a container's id in the name of its group.
const ENGINES: [&str; 7] = [
    "docker-",
    "cri-containerd-",
    "crio-",
    "libpod-payload-",
    "libpod-",
    "nerdctl-",
    "containerd-",
];
/// What Podman, which runs as part of the caller's unit, puts there.
const PODMAN: &str = "libpod-";

/// What is known of a process's control groups.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Groups {
    /// The path that tells most.
    pub(super) path: Option<String>,
    /// The id of the innermost container; an LXC container's name.
    pub(super) container: Option<String>,
    /// The innermost systemd unit, a service if there is one.
    pub(super) unit: Option<String>,
    /// The UID of the pod.
    pub(super) pod: Option<String>,
}

impl Groups {
    /// Those of a process.
    pub(super) fn of(process: &PinnedProcess) -> Self {
        let bytes = read_start(process, "cgroup", MAX_CGROUPS).unwrap_or_default();
        Self::parse(&String::from_utf8_lossy(&bytes))
    }

    /// Reads `/proc/PID/cgroup`: a line `NUMBER:CONTROLLERS:PATH` for each
    /// hierarchy, that of version 2 with number 0 and no controllers.
    fn parse(text: &str) -> Self {
        text.lines()
            .filter_map(|line| {
                let (_, rest) = line.split_once(':')?;
                let (controllers, path) = rest.split_once(':')?;
                let groups = Self::of_path(path);
                // The first of the best counts. systemd names groups in version
                // 2 or in its own hierarchy; engines do in all.
                let score = (
                    groups.container.is_some(),
                    groups.unit.is_some(),
                    path != "/",
                    controllers.is_empty(),
                    controllers == "name=systemd",
                );
                Some((score, groups))
            })
            .reduce(|best, next| if next.0 > best.0 { next } else { best })
            .map(|(_, groups)| groups)
            .unwrap_or_default()
    }

    fn of_path(path: &str) -> Self {
        let mut groups = Self {
            path: Some(path.to_owned()),
            ..Self::default()
        };
        let mut parent = "";
        for name in path.split('/') {
            // systemd puts `_` before names that the kernel uses.
            let name = name.strip_prefix('_').unwrap_or(name);
            if let Some(pod) = pod(name) {
                groups.pod = Some(pod);
            }
            if let Some(id) = container(name, parent) {
                groups.container = Some(id.to_owned());
                // Units on the way to a container are the engine's.
                if !name.starts_with(PODMAN) {
                    groups.unit = None;
                }
            } else if is_unit(name, groups.unit.as_deref()) {
                groups.unit = Some(name.to_owned());
            }
            parent = name;
        }
        groups
    }
}

/// The id of the container that a group of this name is for.
fn container<'a>(name: &'a str, parent: &str) -> Option<&'a str> {
    if let Some(name) = name.strip_prefix("lxc.payload.") {
        return Some(name).filter(|name| !name.is_empty());
    }
    if matches!(parent, "lxc" | "lxc.payload") && !name.is_empty() {
        return Some(name);
    }
    // `kubepods-burstable-podUID.slice:cri-containerd:ID`: containerd that was
    // told of another driver than the kubelet.
    let name = name.rsplit(':').next().unwrap_or(name);
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let id = ENGINES
        .iter()
        .find_map(|engine| name.strip_prefix(engine))
        .unwrap_or(name);
    // Amazon ECS on Fargate: the id of the task and a number.
    let is_task = |id: &str| {
        id.split_once('-').is_some_and(|(task, number)| {
            task.len() == 32
                && is_hex(task)
                && (8..=10).contains(&number.len())
                && number.bytes().all(|byte| byte.is_ascii_digit())
        })
    };
    ((id.len() == ID_DIGITS && is_hex(id)) || is_task(id)).then_some(id)
}

/// The UID in the name of a pod's group: `podUID`, or
/// `kubepods-burstable-podUID.slice` with `_` for `-`.
fn pod(name: &str) -> Option<String> {
    let name = name.split(':').next().unwrap_or(name);
    let uid = match name.strip_suffix(".slice") {
        Some(name) => name.rsplit_once("-pod")?.1.replace('_', "-"),
        None => name.strip_prefix("pod")?.to_owned(),
    };
    // Those of static pods are a hash.
    let is_uuid = uid.split('-').map(str::len).eq([8, 4, 4, 4, 12]) && uid.len() == 36;
    let digits = uid.replace('-', "");
    ((is_uuid || uid.len() == 32) && digits.len() == 32 && is_hex(&digits)).then_some(uid)
}

/// Whether a group is that of a unit, and a better answer than what there is: a
/// service within a user's session is, a scope within a service is not, unless
/// the service is the user's manager.
fn is_unit(name: &str, known: Option<&str>) -> bool {
    let known_service = known.is_some_and(|unit| unit.ends_with(".service"));
    let in_session = known.is_some_and(|unit| unit.starts_with("user@"));
    if name.ends_with(".service") {
        name.len() > ".service".len()
    } else {
        name.ends_with(".scope") && name != "init.scope" && (!known_service || in_session)
    }
}

fn is_hex(text: &str) -> bool {
    text.bytes()
        .all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "9ec39b91f3d70e1beff50a308f77067065ea6be0d91a3378375056cd4422cf3d";
    const NODE: &str = "4f797c539e6c745de61a93ca3ff892358ecbcaccd8414d5db545c38428142970";
    const UID: &str = "f81d4fae-7dec-11d0-a765-00a0c91e6bf6";
    const SLICE: &str = "f81d4fae_7dec_11d0_a765_00a0c91e6bf6";

    /// Container, unit and pod of a path in version 2.
    fn found(path: &str) -> (Option<String>, Option<String>, Option<String>) {
        let groups = Groups::parse(&format!("0::{path}\n"));
        assert_eq!(groups.path.as_deref(), Some(path));
        (groups.container, groups.unit, groups.pod)
    }

    fn expect(path: &str, container: Option<&str>, unit: Option<&str>, pod: Option<&str>) {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        assert_eq!(
            found(path),
            (owned(container), owned(unit), owned(pod)),
            "{path}"
        );
    }

    #[test]
    fn containers_are_found_whatever_the_engine() {
        for path in [
            format!("/docker/{ID}"),
            format!("/system.slice/docker-{ID}.scope"),
            format!("/system.slice/docker.service/docker-{ID}.scope"),
            format!("/machine.slice/libpod-{ID}.scope"),
            format!("/libpod_parent/libpod-{ID}"),
            format!("/system.slice/nerdctl-{ID}.scope"),
            format!("/default/{ID}"),
            format!("/actions_job/{ID}"),
            // Seen from another cgroup namespace.
            format!("/../../docker-{ID}.scope"),
            format!("/ecs/3f2b7e53a5a64cd1b8f4e2a0c9d8e7f6/{ID}"),
            // Innermost: Kubernetes in Docker, Docker in Docker.
            format!("/docker/{NODE}/docker/{ID}"),
        ] {
            expect(&path, Some(ID), None, None);
        }
        expect(
            "/ecs/34dc0b5e626f2c5c4c5170e34b10e765/34dc0b5e626f2c5c4c5170e34b10e765-1234567890",
            Some("34dc0b5e626f2c5c4c5170e34b10e765-1234567890"),
            None,
            None,
        );
        expect("/lxc/web", Some("web"), None, None);
        expect(
            "/lxc.payload.web/system.slice/shop.service",
            Some("web"),
            Some("shop.service"),
            None,
        );
    }

    #[test]
    fn pods_are_found_with_either_driver() {
        for path in [
            format!("/kubepods/burstable/pod{UID}/{ID}"),
            format!("/kubepods/pod{UID}/{ID}"),
            format!(
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICE}.slice/cri-containerd-{ID}.scope"
            ),
            format!("/kubepods.slice/kubepods-pod{SLICE}.slice/crio-{ID}.scope"),
            format!("/kubepods.slice/kubepods-pod{SLICE}.slice/crio-{ID}.scope/container"),
            format!(
                "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SLICE}.slice/docker-{ID}.scope"
            ),
            format!(
                "/system.slice/containerd.service/kubepods-besteffort-pod{SLICE}.slice:cri-containerd:{ID}"
            ),
            format!(
                "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICE}.slice/cri-containerd-{ID}.scope"
            ),
            format!("/docker/{NODE}/kubelet/kubepods/besteffort/pod{UID}/{ID}"),
        ] {
            expect(&path, Some(ID), None, Some(UID));
        }
        // A static pod's.
        let hash = "d2f5a7b1c3e4f60718293a4b5c6d7e8f";
        expect(
            &format!("/kubepods/pod{hash}/{ID}"),
            Some(ID),
            None,
            Some(hash),
        );
    }

    #[test]
    fn units_are_those_of_the_process() {
        for (path, unit) in [
            ("/system.slice/shop.service", Some("shop.service")),
            (
                "/system.slice/system-puma.slice/puma@shop.service",
                Some("puma@shop.service"),
            ),
            ("/system.slice/shop.service/worker", Some("shop.service")),
            (
                "/user.slice/user-1000.slice/session-3.scope",
                Some("session-3.scope"),
            ),
            (
                "/user.slice/user-1000.slice/user@1000.service/app.slice/shop.service",
                Some("shop.service"),
            ),
            (
                "/user.slice/user-1000.slice/user@1000.service/app.slice/app-org.gnome.Terminal.slice/vte-spawn-1.scope",
                Some("vte-spawn-1.scope"),
            ),
            (
                "/user.slice/user-1000.slice/user@1000.service/init.scope",
                Some("user@1000.service"),
            ),
            ("/system.slice/_cpu.service", Some("cpu.service")),
            ("/init.scope", None),
            ("/system.slice/.service", None),
            ("/", None),
        ] {
            expect(path, None, unit, None);
        }
        // A container's own, and one that Podman runs for a unit.
        expect(
            &format!("/system.slice/docker-{ID}.scope/system.slice/shop.service"),
            Some(ID),
            Some("shop.service"),
            None,
        );
        expect(
            &format!("/system.slice/shop.service/libpod-payload-{ID}"),
            Some(ID),
            Some("shop.service"),
            None,
        );
        expect(
            &format!(
                "/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container"
            ),
            Some(ID),
            Some("user@1000.service"),
            None,
        );
    }

    #[test]
    fn what_only_looks_like_a_container_is_none() {
        for path in [
            &format!("/machine.slice/libpod-conmon-{ID}.scope"),
            &format!("/system.slice/docker-{}.scope", &ID[1..]),
            &format!("/system.slice/docker-{}.scope", ID.to_uppercase()),
        ] {
            assert_eq!(found(path).0, None, "{path}");
        }
        assert_eq!(found("/kubepods/podtasks").2, None);
        assert_eq!(found("/x/pod------------------------------------").2, None);
    }

    #[test]
    fn the_hierarchy_that_tells_most_counts() {
        let first = format!(
            "12:pids:/\n3:memory:/user.slice\n2:cpu,cpuacct:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/\n"
        );
        let groups = Groups::parse(&first);
        assert_eq!(groups.container.as_deref(), Some(ID));
        // Hybrid: the unit is in systemd's hierarchy.
        let hybrid = "9:memory:/system.slice\n1:name=systemd:/system.slice/shop.service\n0::/system.slice/shop.service\n";
        let groups = Groups::parse(hybrid);
        assert_eq!(groups.unit.as_deref(), Some("shop.service"));
        for (text, path) in [
            ("2:cpu:/\n0::/\n", Some("/")),
            ("3:memory:/a\n0::/\n", Some("/a")),
            ("nonsense\n", None),
            ("", None),
        ] {
            assert_eq!(Groups::parse(text).path.as_deref(), path, "{text}");
        }
    }
}
