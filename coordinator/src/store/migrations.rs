//! Migrations: named, forward only, each one transaction with its entry in the table `migration`. A number is never
//! reused, and a file that was released is never changed: fixtures of every past form are kept and brought forward by the
//! tests.

use super::StoreError;

/// A name and the SQL of one backend.
pub(super) type Migration = (&'static str, &'static str);

pub(super) const SQLITE: &[Migration] = &[
    ("0001_first", include_str!("migrations/sqlite/0001_first.sql")),
    ("0002_people", include_str!("migrations/sqlite/0002_people.sql")),
    ("0003_events", include_str!("migrations/sqlite/0003_events.sql")),
    ("0004_upgrade", include_str!("migrations/sqlite/0004_upgrade.sql")),
    ("0005_certificates_of_a_host", include_str!("migrations/sqlite/0005_certificates_of_a_host.sql")),
    ("0006_evidence_in_order", include_str!("migrations/sqlite/0006_evidence_in_order.sql")),
    ("0007_launched_instances", include_str!("migrations/sqlite/0007_launched_instances.sql")),
];

#[cfg(feature = "postgres")]
pub(super) const POSTGRES: &[Migration] = &[
    ("0001_first", include_str!("migrations/postgres/0001_first.sql")),
    ("0002_lease", include_str!("migrations/postgres/0002_lease.sql")),
    ("0003_people", include_str!("migrations/postgres/0003_people.sql")),
    ("0004_upgrade", include_str!("migrations/postgres/0004_upgrade.sql")),
    ("0005_certificates_of_a_host", include_str!("migrations/postgres/0005_certificates_of_a_host.sql")),
    ("0006_launched_instances", include_str!("migrations/postgres/0006_launched_instances.sql")),
];

/// What is still to be done to a store at which `done` was done; a store that knows more than this program is refused.
pub(super) fn pending<'a>(all: &'a [Migration], done: &[String], place: &str) -> Result<&'a [Migration], StoreError> {
    if let Some(found) = done.iter().find(|d| !all.iter().any(|(name, _)| name == d)) {
        return Err(StoreError::TooNew { place: place.to_owned(), found: found.clone() });
    }
    Ok(&all[done.len()..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_order() {
        let all = [
            SQLITE,
            #[cfg(feature = "postgres")]
            POSTGRES,
        ];
        for all in all {
            for (i, (name, _)) in all.iter().enumerate() {
                assert_eq!(name.split('_').next(), Some(format!("{:04}", i + 1).as_str()), "{name}");
            }
        }
    }
}
