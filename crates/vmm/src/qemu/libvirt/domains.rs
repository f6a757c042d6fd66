//! The domains of a host.
use std::sync::Arc;

use transship_guest::GuestError;

use super::{ActiveDomain, Address, connection::Connection};

/// Those that run or are paused, the largest first.
///
/// # Errors
/// libvirt can't be reached.
pub fn active(uri: Option<&str>) -> Result<Vec<ActiveDomain>, GuestError> {
    let unfit = |why: String| {
        let uri = uri.unwrap_or("its default URI");
        GuestError::Unfit(format!("can't list the domains of libvirt at {uri}: {why}"))
    };
    let connection = Arc::new(Connection::open(uri).map_err(unfit)?);
    let domains = connection.active().map_err(|failure| unfit(failure.why))?;
    let mut found: Vec<ActiveDomain> = domains
        .iter()
        .map(|domain| ActiveDomain {
            address: Address { uri: uri.map(str::to_owned), domain: domain.name() },
            memory_bytes: domain.memory_bytes(),
        })
        .collect();
    found.sort_by_key(|domain| std::cmp::Reverse(domain.memory_bytes));
    Ok(found)
}
