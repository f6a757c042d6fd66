//! What libvirt must know of a domain to restore it: its definition, and beside it a cookie that says which features
//! the guest's CPU really has.
use transship_wire::libvirt::Definition;

/// As libvirt itself keeps it in what it saves: with passwords (1), and as any libvirt understands it (8).
pub(super) const LASTING: u32 = 1 | 8;
/// As it runs now.
pub(super) const LIVE: u32 = 0;

/// Of both forms of a definition.
///
/// # Errors
/// One of them is not what libvirt writes.
pub(super) fn of(lasting: String, live: &str) -> Result<Definition, String> {
    let cookie = cookie(live)?;
    Definition::new(lasting, Some(cookie)).map_err(|error| error.to_string())
}

/// In it are the CPU as it runs, and a note unless the domain has a network card that QEMU itself connects: such a card
/// can be restored with the help of a program of its own, and must not be if it was saved without.
fn cookie(live: &str) -> Result<String, String> {
    let document = roxmltree::Document::parse(live).map_err(|error| format!("it is no XML: {error}"))?;
    let domain = document.root_element();
    let cpu = domain.children().find(|child| child.has_tag_name("cpu"));
    let cpu = cpu.map_or_else(String::new, |cpu| format!("  {}\n", &live[cpu.range()]));
    let devices = domain.children().filter(|child| child.has_tag_name("devices"));
    let mut cards = devices.flat_map(|devices| devices.children());
    let connected_by_qemu =
        cards.any(|card| card.has_tag_name("interface") && card.attribute("type") == Some("user") && !is_passt(card));
    let note = if connected_by_qemu { "" } else { "  <slirpHelper/>\n" };
    Ok(format!("<cookie>\n{cpu}{note}</cookie>\n"))
}

/// Whether a program beside QEMU connects it.
fn is_passt(card: roxmltree::Node<'_, '_>) -> bool {
    card.children().any(|child| child.has_tag_name("backend") && child.attribute("type") == Some("passt"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const CPU: &str = "<cpu mode='custom'>\n    <model>qemu64</model>\n  </cpu>";

    fn domain(cpu: &str, devices: &str) -> String {
        format!("<domain type='kvm'>\n  <name>g1</name>\n  {cpu}\n  <devices>{devices}</devices>\n</domain>\n")
    }

    /// As libvirt 11.3 writes them.
    #[test]
    fn a_cookie_has_the_cpu_that_runs_and_says_who_connects_the_network() {
        let without = format!("<cookie>\n  {CPU}\n</cookie>\n");
        let with = format!("<cookie>\n  {CPU}\n  <slirpHelper/>\n</cookie>\n");
        for (devices, expected) in [
            ("", &with),
            ("<interface type='network'/>", &with),
            ("<interface type='user'><backend type='passt'/></interface>", &with),
            ("<interface type='network'/><interface type='user'/>", &without),
        ] {
            assert_eq!(cookie(&domain(CPU, devices)).unwrap(), **expected, "{devices}");
        }
        assert_eq!(cookie(&domain("", "")).unwrap(), "<cookie>\n  <slirpHelper/>\n</cookie>\n");
    }

    #[test]
    fn what_defines_no_domain_is_refused() {
        assert!(of("<network><name>n</name></network>".into(), &domain(CPU, "")).unwrap_err().contains("no domain"));
        assert!(of(domain(CPU, ""), "no XML").unwrap_err().contains("no XML"));
        assert_eq!(of(domain(CPU, ""), &domain(CPU, "")).unwrap().name(), "g1");
    }
}
