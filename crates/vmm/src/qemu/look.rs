//! For people who ask before they do anything: what a QEMU is made of, and what would work with it.
//!
//! Refusals come from [`super::survey`], as they do when attaching. Nothing is changed in QEMU: it is asked by QMP, and
//! looked at through /proc.
use std::{fs, path::Path};

use serde_json::json;
use transship_guest::GuestError;
use transship_memory::GuestMemory;

use super::{
    back_ends::BackEnds,
    checks, faults, libvirt,
    machine::{run_state, user_devices},
    memory::Backend,
    nested,
    qmp::Qmp,
    survey::{self, DestinationSeen, SourceSeen},
    writers,
};
use crate::{
    AttachOptions,
    looked::{DiskFound, Looked, MemoryFound, Use},
};

/// What is in the way of something.
type Refusals = Vec<String>;

/// Looks at the QEMU whose QMP socket this is.
///
/// # Errors
/// It does not answer.
pub fn look(socket: &Path, options: &AttachOptions) -> Result<Looked, GuestError> {
    over(Qmp::connect(socket)?, options)
}

/// Looks at the QEMU of a domain of libvirt.
///
/// # Errors
/// libvirt, or QEMU, does not answer; another transship has the domain, or a job of libvirt's.
pub fn look_at_domain(address: &libvirt::Address, options: &AttachOptions) -> Result<Looked, GuestError> {
    let mut looked = over(libvirt::attach(address)?, options)?;
    let (moves, mut others): (Vec<_>, Vec<_>) = looked.uses.drain(..).partition(|one| one.what.starts_with("move"));
    others.extend(moves.iter().map(|one| Use::of(&one.what, vec![libvirt::NO_MOVES.to_owned()])));
    looked.uses = others;
    Ok(looked)
}

fn over(mut qmp: Qmp, options: &AttachOptions) -> Result<Looked, GuestError> {
    let state = run_state(&mut qmp)?;
    let (uses, memory, machine) = match state.as_str() {
        "inmigrate" => destination(&mut qmp),
        _ => source(&mut qmp, options),
    };
    let doubts = if state == "inmigrate" { None } else { nested::doubt(&mut qmp) };
    Ok(Looked {
        vmm: format!("QEMU {}", version(&mut qmp)?),
        pid: qmp.pid(),
        machine,
        state,
        kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
        memory,
        disks: disks(&mut qmp)?,
        devices: user_devices(&mut qmp)?,
        rights: rights(&qmp),
        uses,
        doubts: doubts.into_iter().collect(),
    })
}

type Found = (Vec<Use>, Vec<MemoryFound>, Option<String>);

/// Calls `look` so that it goes on behind each refusal that it can go on behind.
fn collected<T>(look: impl FnOnce(survey::Refuse<'_>) -> Result<T, GuestError>, refusals: &mut Refusals) -> Option<T> {
    let mut keep = |why: GuestError| {
        refusals.push(why.to_string());
        Ok(())
    };
    let seen = look(&mut keep);
    seen.map_err(|why| refusals.push(why.to_string())).ok()
}

fn source(qmp: &mut Qmp, options: &AttachOptions) -> Found {
    let mut attach = Refusals::new();
    let seen = collected(|refuse| SourceSeen::look(qmp, options, refuse), &mut attach);
    let with = |more: Refusals| [attach.clone(), more].concat();
    let (mut background, mut stock, mut stays) = (Refusals::new(), Refusals::new(), Refusals::new());
    let none = BackEnds::default();
    let back_ends = seen.as_ref().map_or(&none, |seen| &seen.back_ends);
    collected(|refuse| survey::background(qmp, back_ends, refuse), &mut background);
    collected(|refuse| back_ends.check_going_on().or_else(refuse), &mut stays);
    collected(|refuse| checks::state_before_pages(qmp).or_else(refuse), &mut stock);
    let uses = vec![
        Use::of("move", attach.clone()),
        Use::of("move --peer qemu", with(stock)),
        Use::of("save --paused", with(stays.clone())),
        Use::of("save --live", with(stays)),
        Use::of("save --background", with(background)),
        Use::of("watch", attach.clone()),
    ];
    match seen {
        Some(seen) => (uses, memory(&seen.backends, &seen.memory), Some(seen.description.machine)),
        None => (uses, Vec::new(), None),
    }
}

fn destination(qmp: &mut Qmp) -> Found {
    let mut attach = Refusals::new();
    let seen = collected(|refuse| DestinationSeen::look(qmp, refuse), &mut attach);
    let mut lazy = attach.clone();
    if let Some(seen) = &seen {
        collected(|refuse| survey::lazy(qmp, &seen.memory, refuse), &mut lazy);
    }
    let uses = vec![
        Use::of("receive", attach.clone()),
        Use::of("receive --peer qemu", attach.clone()),
        Use::of("restore", attach),
        Use::of("restore --lazy", lazy),
    ];
    match seen {
        Some(seen) => (uses, memory(&seen.backends, &seen.memory), Some(seen.description.machine)),
        None => (uses, Vec::new(), None),
    }
}

fn memory(backends: &[Backend], mapped: &GuestMemory) -> Vec<MemoryFound> {
    let found = backends.iter().zip(mapped.regions()).map(|(backend, region)| MemoryFound {
        name: backend.id.clone(),
        bytes: backend.bytes,
        kind: backend.kind(),
        page_bytes: region.backing_page_bytes(),
    });
    found.collect()
}

fn disks(qmp: &mut Qmp) -> Result<Vec<DiskFound>, GuestError> {
    let text = |value: &serde_json::Value| value.as_str().unwrap_or("?").to_owned();
    let found = writers::nodes(qmp)?.into_iter().map(|node| DiskFound {
        name: text(&node["node-name"]),
        driver: text(&node["drv"]),
        direct: node["cache"]["direct"].as_bool() == Some(true),
    });
    Ok(found.collect())
}

fn rights(qmp: &Qmp) -> Vec<Use> {
    let right =
        |what: &str, may: Result<(), GuestError>| Use::of(what, may.err().iter().map(GuestError::to_string).collect());
    vec![
        right("trace the VMM", checks::may_ptrace(qmp.pid())),
        right("have it track writes", checks::host().and_then(|()| faults::may_track(qmp.pid()))),
        right("have it wait for pages", faults::may_make_wait(qmp)),
    ]
}

fn version(qmp: &mut Qmp) -> Result<String, GuestError> {
    let version = qmp.execute("query-version", json!({}))?;
    let number = |name: &str| version["qemu"][name].as_u64().unwrap_or(0);
    Ok(format!("{}.{}.{}", number("major"), number("minor"), number("micro")))
}
