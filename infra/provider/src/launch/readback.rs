//! Whether what the cloud shows is what was ordered. AWS accepts options that it then drops.

use crate::{
    cloud::{Instance, LaunchOrder},
    tags,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadBack {
    Same,
    /// Something is not shown yet, which says nothing.
    NotYet(String),
    /// Something is shown, and it is not as ordered.
    Differs(String),
}

/// Compares everything that keeps a host mortal, reachable by nobody, and worth measuring on. The deadline's tag may be
/// earlier than ordered: someone shortened it already.
pub fn read_back(order: &LaunchOrder, seen: &Instance) -> ReadBack {
    let recipe = &order.recipe;
    let mut not_yet = Vec::new();
    let mut differs = Vec::new();
    let mut check = |what: &str, ok: Option<bool>, found: String| match ok {
        Some(true) => {}
        Some(false) => differs.push(format!("{what} is {found}")),
        None => not_yet.push(what.to_owned()),
    };
    check("the type", seen.kind.as_ref().map(|k| *k == recipe.kind), format!("{:?}", seen.kind));
    check("the image", seen.image.as_ref().map(|i| *i == recipe.image), format!("{:?}", seen.image));
    check("the subnet", seen.subnet.as_ref().map(|s| *s == order.placement.subnet), format!("{:?}", seen.subnet));
    // Absent is off, as AWS shows it for types without; asked for, absent is not yet known.
    let nested = if recipe.nested { seen.nested } else { Some(seen.nested != Some(true)) };
    check("nested virtualisation", nested, format!("{:?} where {} was ordered", seen.nested, recipe.nested));
    check("a required token for instance metadata", seen.imds_v2, "off".to_owned());
    check("no public address", Some(!seen.public_address), "not so".to_owned());
    let mut groups = (seen.security_groups.clone(), recipe.security_groups.clone());
    groups.0.sort();
    groups.1.sort();
    check("the security groups", Some(groups.0 == groups.1), format!("{:?}", seen.security_groups));
    check("the instance profile", seen.profile.as_ref().map(|p| *p == recipe.profile), format!("{:?}", seen.profile));
    let volumes = (!seen.volumes.is_empty()).then(|| seen.volumes.iter().all(|v| v.delete_on_termination));
    check("delete on termination", volumes, "off for a volume".to_owned());
    for (key, ordered) in order.tags() {
        let shown = seen.tags.get(&key);
        let same = |shown: &String| {
            let earlier = || crate::words::read_instant(shown).is_some_and(|at| at <= order.due);
            *shown == ordered || (key == tags::DEADLINE && earlier())
        };
        // Tags are set by the launch itself, and still shown late.
        let ok = if seen.tags.is_empty() { None } else { Some(shown.is_some_and(same)) };
        check(&format!("tag {key}"), ok, format!("{shown:?} where {ordered:?} was ordered"));
    }
    match &seen.attributes {
        Some(Ok(attributes)) => differs.extend(attributes.undying().into_iter().map(str::to_owned)),
        Some(Err(e)) => not_yet.push(format!("its attributes ({e})")),
        None => not_yet.push("its attributes".to_owned()),
    }
    if !differs.is_empty() {
        ReadBack::Differs(differs.join(", "))
    } else if !not_yet.is_empty() {
        ReadBack::NotYet(not_yet.join(", "))
    } else {
        ReadBack::Same
    }
}
