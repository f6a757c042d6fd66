//! The end-to-end tests: the built command, and real guests that know what every page of their memory must hold. They
//! are one program, since each would be linked by itself, and while one test waits for its guest another can go on.
//!
//! - The lab: `guests` and `link`, without which no other test would notice a thing
//! - Moves: `moves`, `converging`, `post_copy`, `at_stop`, `codecs`, `run_state`, `run_at_once`, `disks`,
//!   `direct_disks`, `strangers`, `settings`; seen and steered from outside: `control`, `holding`; over networks that
//!   nobody trusts: `tokens`, `certificates`; what others on the same host get: `privacy`; who dies in one: `crash`
//! - To and from a stock QEMU: `qemu_peer_send`, `qemu_peer_receive`, `relay`, `relay_many`; over TLS: `qemu_tls`; who
//!   dies in one: `qemu_peer_crash`
//! - Snapshots: `save`, `background`, `restore`, `restore_lazy`, `restore_lazy_full`, `restore_lazy_private`,
//!   `restore_given_back`, `convert`, `encrypted`
//! - Images and guests that share them: `clones`, `clones_refused`, `forks`
//! - What is said beforehand: `check`, `plan`; domains of libvirt: `libvirt`, `libvirt_images`, `libvirt_disks`,
//!   `libvirt_migrate`
//! - Memory: `any_memory`, `huge_pages`, `preallocated`, `free_pages`, `writers`, `vhost_user`, `vhost_user_fs`,
//!   `vhost_user_net`, `trackers`; who says which of it is free: `balloon`, `hints`; whose QEMU it is, and what that
//!   sees: `places`
//! - What several of them need: `ends`, `middle`, `peer`, `restoring`, `sector`, `steering`, `stock`
mod any_memory;
mod at_stop;
mod background;
mod balloon;
mod certificates;
mod check;
mod clones;
mod clones_refused;
mod codecs;
mod control;
mod converging;
mod convert;
mod crash;
mod direct_disks;
mod disks;
mod encrypted;
mod ends;
mod forks;
mod free_pages;
mod guests;
mod hints;
mod holding;
mod hosts;
mod huge_pages;
mod libvirt;
mod libvirt_disks;
mod libvirt_images;
mod libvirt_migrate;
mod link;
mod middle;
mod moves;
mod peer;
mod places;
mod plan;
mod post_copy;
mod post_copy_killed;
mod post_copy_recovered;
mod preallocated;
mod privacy;
mod qemu_peer_crash;
mod qemu_peer_receive;
mod qemu_peer_send;
mod qemu_tls;
mod relay;
mod relay_many;
mod restore;
mod restore_given_back;
mod restore_lazy;
mod restore_lazy_full;
mod restore_lazy_private;
mod restoring;
mod run_at_once;
mod run_state;
mod sandbox;
mod sandbox_clones;
mod sandbox_filling;
mod sandbox_huge_pages;
mod sandbox_libvirt;
mod sandbox_passed;
mod save;
mod sector;
mod settings;
mod steering;
mod stock;
mod strangers;
mod tokens;
mod trackers;
mod vhost_user;
mod vhost_user_fs;
mod vhost_user_net;
mod writers;
