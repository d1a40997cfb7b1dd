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
fn a_folder_is_built_again_from_its_files_by_digest() {
    let s = Sample::new();
    let frozen = freeze(&s.path("w")).unwrap();
    let text = fs::read(s.path("w/manifest.json")).unwrap();
    let blobs = s.path("blobs");
    fs::create_dir(&blobs).unwrap();
    for (name, file) in frozen.files.iter().filter(|(_, f)| f.kind == "file") {
        fs::copy(s.path("w").join(name), blobs.join(file.sha256.to_string())).unwrap();
    }
    let blob = |file: &ManifestFile| blobs.join(file.sha256.to_string());
    fs::create_dir(s.path("again")).unwrap();
    assemble(&s.path("again"), &text, &frozen, &blob).unwrap();
    assert_eq!(verify(&s.path("again")).unwrap(), frozen);
    // A blob that is not what its name says is noticed.
    fs::write(blob(&frozen.files["tree/bin/tool"]), b"other").unwrap();
    fs::create_dir(s.path("third")).unwrap();
    let error = assemble(&s.path("third"), &text, &frozen, &blob).unwrap_err();
    assert!(error.to_string().contains("tree/bin/tool"), "{error}");
}

#[test]
fn every_kind_of_change_is_named() {
    let change = |act: &dyn Fn(&Path), word: &str, file: &str| {
        let s = Sample::new();
        freeze(&s.path("w")).unwrap();
        act(&s.path("w/tree"));
        let error = verify(&s.path("w")).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains(file), "{error}");
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
