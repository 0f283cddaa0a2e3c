#!/bin/busybox sh
# The first process of a virtual machine: mounts what a system has, runs the
# command, says how it ended, and switches the machine off.
export PATH=/bin HOME=/root TERM=vt102
export RBPROF_WORKLOADS=/workloads RBPROF_REQUIRE_ALL=1
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t bpf bpf /sys/fs/bpf
mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null
mount -t securityfs securityfs /sys/kernel/security 2>/dev/null
ip link set lo up
hostname rbprof-vm
chmod 1777 /tmp
for root in /rubies/*; do
    mount -o bind /dev "$root/dev"
    mount -t tmpfs tmp "$root/tmp"
done
cd /root
# A shell of its own session, so that it can have the console to itself.
setsid -c /command
status=$?
echo
echo "$(cat /mark) $status"
poweroff -f
