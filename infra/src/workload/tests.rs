use super::*;

struct Sample {
    folder: tempfile::TempDir,
}

impl Sample {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path().join("w/tree");
        fs::create_dir_all(tree.join("bin")).unwrap();
        fs::create_dir_all(tree.join("locked")).unwrap();
        fs::write(tree.join("bin/tool"), b"#!/bin/sh\n").unwrap();
        fs::set_permissions(tree.join("bin/tool"), fs::Permissions::from_mode(0o755)).unwrap();
        symlink("tool", tree.join("bin/sh")).unwrap();
        symlink("../../../../etc", tree.join("bin/out")).unwrap();
        fs::write(tree.join("locked/file"), b"x").unwrap();
        fs::set_permissions(tree.join("locked"), fs::Permissions::from_mode(0o555)).unwrap();
        Self { folder }
    }
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

#[test]
fn a_folder_survives_the_journey_and_packs_to_the_same_bytes() {
    let s = Sample::new();
    let frozen = freeze(&s.path("w")).unwrap();
    let a = pack(&s.path("w"), &s.path("a")).unwrap();
    assert_eq!(a.workload, frozen.sha256());
    assert_eq!(a.artifact, Sha256::of(&fs::read(s.path("a")).unwrap()));
    let unpacked = unpack(&s.path("a"), &s.path("out/x"), a.workload).unwrap();
    assert_eq!(unpacked, frozen);
    assert_eq!(verify(&s.path("out/x")).unwrap(), frozen);
    assert_eq!(pack(&s.path("out/x"), &s.path("b")).unwrap(), a);
    assert_eq!(fs::read_dir(s.path("out")).unwrap().count(), 1, "nothing else was left");
}

#[test]
fn every_kind_of_change_is_named() {
    let change = |act: &dyn Fn(&Path), word: &str, file: &str| {
        let s = Sample::new();
        freeze(&s.path("w")).unwrap();
        act(&s.path("w/tree"));
        let error = verify(&s.path("w")).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains(file), "{error}");
        assert!(pack(&s.path("w"), &s.path("a")).is_err());
    };
    change(&|t| fs::write(t.join("bin/tool"), b"#!/bin/xx\n").unwrap(), "SHA-256", "tree/bin/tool");
    change(&|t| fs::write(t.join("bin/tool"), b"longer than before").unwrap(), "bytes", "tree/bin/tool");
    change(&|t| fs::remove_file(t.join("bin/tool")).unwrap(), "missing", "tree/bin/tool");
    change(&|t| fs::write(t.join("new"), b"").unwrap(), "not in the manifest", "tree/new");
    change(
        &|t| fs::set_permissions(t.join("bin/tool"), fs::Permissions::from_mode(0o4755)).unwrap(),
        "4755",
        "tree/bin/tool",
    );
    change(
        &|t| {
            fs::remove_file(t.join("bin/sh")).unwrap();
            symlink("other", t.join("bin/sh")).unwrap();
        },
        "SHA-256",
        "tree/bin/sh",
    );
}

#[test]
fn a_pipe_has_no_place_in_a_workload() {
    let s = Sample::new();
    nix::unistd::mkfifo(&s.path("w/tree/pipe"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    assert!(freeze(&s.path("w")).unwrap_err().to_string().contains("tree/pipe"));
}

fn manifest(files: &[(&str, &str, u64, &str)]) -> WorkloadManifest {
    let files = files
        .iter()
        .map(|(name, kind, bytes, target)| {
            let of = if *kind == "symlink" { target.as_bytes() } else { b"" };
            let file = ManifestFile {
                kind: (*kind).into(),
                mode: 0o755,
                bytes: *bytes,
                sha256: Sha256::of(of),
                target: (*target).into(),
            };
            ((*name).to_owned(), file)
        })
        .collect();
    WorkloadManifest { version: LAYOUT_VERSION, files }
}

#[test]
fn manifests_that_lead_out_or_beyond_bounds_are_refused() {
    let tree = ("tree", "dir", 0, "");
    for (files, word) in [
        (vec![tree, ("tree/../../x", "file", 0, "")], "plain path"),
        (vec![tree, ("/etc", "dir", 0, ""), ("/etc/x", "file", 0, "")], "plain path"),
        (vec![tree, ("tree//x", "file", 0, "")], "plain path"),
        (vec![tree, ("tree/./x", "file", 0, "")], "plain path"),
        (vec![tree, ("tree/", "file", 0, "")], "plain path"),
        (vec![tree, ("", "file", 0, "")], "plain path"),
        (vec![tree, ("manifest.json", "file", 0, "")], "plain path"),
        (vec![tree, ("tree/a/b", "file", 0, "")], "folder of the manifest"),
        (vec![tree, ("tree/a", "symlink", 0, "/etc"), ("tree/a/b", "file", 0, "")], "folder of the manifest"),
        (vec![tree, ("tree/a", "device", 0, "")], "neither"),
        (vec![tree, ("tree/a", "symlink", 0, "")], "neither"),
        (vec![tree, ("tree/a", "file", MAX_TOTAL_BYTES + 1, "")], "more than"),
        (vec![], "no folder tree"),
    ] {
        let error = check(&manifest(&files)).unwrap_err();
        assert!(error.contains(word), "{files:?}: {error}");
    }
}

/// An artifact with this manifest and these entries, which need not fit.
fn forge(path: &Path, text: &str, entries: &[(&str, &[u8])]) {
    let mut tar = tar::Builder::new(zstd::Encoder::new(File::create(path).unwrap(), 1).unwrap());
    for (name, content) in [(MANIFEST, text.as_bytes())].iter().chain(entries) {
        let kind = if content.is_empty() { tar::EntryType::Directory } else { tar::EntryType::Regular };
        let mut header = blank(kind, 0o755, content.len() as u64);
        // Written past the library's own check of names.
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        tar.append(&header, *content).unwrap();
    }
    tar.into_inner().unwrap().finish().unwrap();
}

#[test]
fn artifacts_that_do_not_follow_their_manifest_leave_nothing_behind() {
    let s = Sample::new();
    let mut good = manifest(&[("tree", "dir", 0, ""), ("tree/a", "file", 5, "")]);
    good.files.get_mut("tree/a").unwrap().sha256 = Sha256::of(b"hello");
    let text = good.canonical();
    let folder = ("tree", &b""[..]);
    for (entries, word) in [
        (vec![folder, ("../escape", b"hello")], "where its manifest has"),
        (vec![folder], "ends before"),
        (vec![folder, ("tree/a", b"hullo")], "SHA-256"),
        (vec![folder, ("tree/a", b"hell")], "4 bytes"),
        (vec![folder, ("tree/a", b"hello"), ("tree/b", b"x")], "more entries"),
    ] {
        forge(&s.path("a"), &text, &entries);
        let error = unpack(&s.path("a"), &s.path("out/x"), good.sha256()).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
        assert_eq!(fs::read_dir(s.path("out")).unwrap().count(), 0);
    }
    assert!(!s.path("escape").exists());
    forge(&s.path("a"), &text, &[("tree", b""), ("tree/a", b"hello")]);
    assert!(unpack(&s.path("a"), &s.path("out/x"), Sha256::of(b"another")).is_err());
    unpack(&s.path("a"), &s.path("out/x"), good.sha256()).unwrap();
}

#[test]
fn garbage_and_truncated_artifacts_are_refused() {
    let s = Sample::new();
    let sha = freeze(&s.path("w")).unwrap().sha256();
    pack(&s.path("w"), &s.path("a")).unwrap();
    let whole = fs::read(s.path("a")).unwrap();
    for cut in [0, 3, 20, whole.len() / 2, whole.len() - 30] {
        fs::write(s.path("b"), &whole[..cut]).unwrap();
        assert!(unpack(&s.path("b"), &s.path("out/x"), sha).is_err(), "{cut}");
    }
    fs::write(s.path("b"), b"not an archive at all").unwrap();
    assert!(unpack(&s.path("b"), &s.path("out/x"), sha).is_err());
}
