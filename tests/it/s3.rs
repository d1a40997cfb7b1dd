//! S3: moto's server on loopback instead of AWS's own.

use std::fs;

use drums_common::digest::Sha256;
use drums_coordinator::{
    artifacts::{ArtifactError, Artifacts, Content},
    bucket::{Bucket, BucketError},
};
use drums_tests::moto::{Moto, SECRET_ACCESS_KEY};

const URL: &str = "s3://evidence/lab";

async fn all(content: &mut Content) -> Vec<u8> {
    let mut out = Vec::new();
    while let Some(chunk) = content.chunk().await.unwrap() {
        out.extend_from_slice(&chunk);
    }
    out
}

/// What every kind of store for artifacts must do.
async fn keeps_the_contract(artifacts: &Artifacts, content: &[u8]) {
    let sha256 = Sha256::of(content);
    assert!(!artifacts.has(sha256).await);
    assert!(artifacts.read(sha256, 0).await.unwrap().is_none());

    // Another content, too much of it, and one that breaks off: nothing is there after each.
    let mut wrong = artifacts.begin(sha256, 1 << 30).await.unwrap();
    wrong.write(content).await.unwrap();
    wrong.write(b"and more").await.unwrap();
    assert!(matches!(wrong.finish().await, Err(ArtifactError::Digest { .. })));
    let mut long = artifacts.begin(sha256, 3).await.unwrap();
    assert!(matches!(long.write(content).await, Err(ArtifactError::TooLarge { limit: 3 })));
    drop(long);
    let mut broken = artifacts.begin(sha256, 1 << 30).await.unwrap();
    broken.write(&content[..content.len() / 2]).await.unwrap();
    drop(broken);
    assert!(!artifacts.has(sha256).await);

    for _ in 0..2 {
        let mut upload = artifacts.begin(sha256, content.len() as u64).await.unwrap();
        for chunk in content.chunks(100_000) {
            upload.write(chunk).await.unwrap();
        }
        upload.finish().await.unwrap();
        assert!(artifacts.has(sha256).await, "put twice, it is there once");
    }
    for offset in [0, 1, content.len() / 2, content.len() - 1, content.len()] {
        let mut got = artifacts.read(sha256, offset as u64).await.unwrap().unwrap();
        assert_eq!(got.total_bytes, content.len() as u64);
        assert!(all(&mut got).await == content[offset..], "from byte {offset}");
    }
}

#[tokio::test]
async fn artifacts_in_a_folder_keep_the_contract() {
    let dir = tempfile::tempdir().unwrap();
    let artifacts = Artifacts::new(dir.path().to_owned());
    keeps_the_contract(&artifacts, &vec![7; 300_000]).await;
    fs::write(dir.path().join(".part-x"), "left").unwrap();
    artifacts.sweep().await;
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing half-made is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn artifacts_in_s3_keep_the_contract_in_one_part_and_in_several() {
    let dir = tempfile::tempdir().unwrap();
    let moto = Moto::start("evidence").unwrap();
    let Bucket::S3(s3) = moto.bucket(URL, dir.path()) else { panic!("not S3") };
    let artifacts = Artifacts::S3(s3);
    keeps_the_contract(&artifacts, &vec![7; 300_000]).await;
    let large: Vec<u8> = (0..20_000_000u32).map(|i| (i ^ (i >> 11)) as u8).collect();
    keeps_the_contract(&artifacts, &large).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_in_s3_is_written_once_and_a_place_is_good_for_that_alone() {
    let dir = tempfile::tempdir().unwrap();
    let moto = Moto::start("evidence").unwrap();
    let bucket = moto.bucket(URL, dir.path());
    bucket.put("a/b.json", b"first".to_vec()).await.unwrap();
    bucket.put("a/b.json", b"second".to_vec()).await.unwrap();
    let Bucket::S3(s3) = &bucket else { panic!("not S3") };
    let (total, _) = s3.read("a/b.json", 0).await.unwrap().unwrap();
    assert_eq!(total, 5, "the first stays");

    // A bucket that is not there is said to be that, without the secret.
    let absent = Moto::start("another").unwrap();
    let e = absent.bucket(URL, dir.path()).put("a", vec![1]).await.unwrap_err();
    let text = drums_common::telemetry::chain(&e);
    assert!(matches!(e, BucketError::Object { .. }) && text.contains("NoSuchBucket"), "{text}");
    assert!(!text.contains(SECRET_ACCESS_KEY), "{text}");
}
