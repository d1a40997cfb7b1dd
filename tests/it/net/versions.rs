//! Either side meets the other one's last version of the wire.

use std::net::SocketAddr;

use drums_agent::net::{Identity, enrol};
use drums_common::{
    digest::Sha256,
    ids::InstallationId,
    token::{Address, Token},
    wire::{
        ALPN_ENROL, SERVER_NAME, codec,
        frame::{self, Lane},
        hello::{HELLO_LEN, Hello, HelloReply, OURS, REPLY_LEN, Versions},
        latest::{EnrolReply, InstanceProof},
        v1,
    },
};
use drums_coordinator::{net::endpoint, pki::SigningRequest};
use quinn::RecvStream;
use serde::{Serialize, de::DeserializeOwned};

use super::{fake::*, hostile::client};

const BUILD: Sha256 = Sha256([7; 32]);
const FIRST: Versions = Versions { min: 1, max: 1 };

fn framed<T: Serialize>(message: &T) -> Vec<u8> {
    frame::wrap(Lane::Enrol, &codec::encode(Lane::Enrol, message).unwrap()).unwrap()
}

async fn read<T: DeserializeOwned>(recv: &mut RecvStream) -> T {
    let mut prefix = [0; frame::PREFIX];
    recv.read_exact(&mut prefix).await.unwrap();
    let mut payload = vec![0; frame::payload_len(Lane::Enrol, prefix).unwrap()];
    recv.read_exact(&mut payload).await.unwrap();
    codec::decode(Lane::Enrol, &payload).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_of_version_1_enrols_as_before() {
    let coordinator = Coordinator::start();
    let token = coordinator.token("h1");
    let endpoint = client(coordinator.pki.ca_der(), None, ALPN_ENROL);
    let connection = endpoint.connect(coordinator.enrol, SERVER_NAME).unwrap().await.unwrap();
    let (mut send, mut recv) = connection.open_bi().await.unwrap();
    send.write_all(&Hello { versions: FIRST, build: BUILD }.encode()).await.unwrap();
    let mut reply = [0; REPLY_LEN];
    recv.read_exact(&mut reply).await.unwrap();
    assert_eq!(HelloReply::parse(&reply).unwrap().accept(FIRST), Ok(1));
    let key = rcgen::KeyPair::generate().unwrap();
    let csr = rcgen::CertificateParams::default().serialize_request(&key).unwrap();
    let (secret, csr_der) = (token.secret.bytes().to_vec(), csr.der().to_vec());
    let request = v1::EnrolRequest { secret, host: token.host, csr_der, installation: InstallationId([1; 4]) };
    send.write_all(&framed(&request)).await.unwrap();
    assert!(matches!(read::<EnrolReply>(&mut recv).await, EnrolReply::Enrolled { .. }));
    assert_eq!(coordinator.store.with(|s| s.enrolled.len()), 1);
}

/// It takes no proof: none is sent, and the rest is as it was.
#[tokio::test(flavor = "multi_thread")]
async fn a_coordinator_of_version_1_is_asked_as_before() {
    let coordinator = Coordinator::start();
    let server = endpoint::enrolment(SocketAddr::from(([127, 0, 0, 1], 0)), &coordinator.pki).unwrap();
    let port = server.local_addr().unwrap().port();
    let pki = coordinator.pki.clone();
    let serving = tokio::spawn(async move {
        let connection = server.accept().await.unwrap().await.unwrap();
        let (mut send, mut recv) = connection.accept_bi().await.unwrap();
        let mut hello = [0; HELLO_LEN];
        recv.read_exact(&mut hello).await.unwrap();
        let hello = Hello::parse(&hello).unwrap();
        assert_eq!(hello.versions, OURS);
        send.write_all(&HelloReply::answer(FIRST, BUILD, &hello).encode()).await.unwrap();
        let request: v1::EnrolRequest = read(&mut recv).await;
        let signing = SigningRequest::parse(&request.csr_der).unwrap();
        let issued = pki.issue_agent(&signing, &request.host, request.installation, drums_common::clock::Micros(0));
        let (certificate_pem, ca_pem) = (issued.unwrap().pem, pki.ca_pem().to_owned());
        send.write_all(&framed(&EnrolReply::Enrolled { certificate_pem, ca_pem })).await.unwrap();
        send.finish().unwrap();
        connection.closed().await;
    });
    let address = Address { host: "127.0.0.1".into(), agents: port, enrol: port };
    let token = Token { addresses: vec![address], ..coordinator.token("h1") };
    let dir = tempfile::tempdir().unwrap();
    let proof = InstanceProof::new(b"{}".to_vec(), "MIAG".to_owned()).unwrap();
    enrol(dir.path(), &token, BUILD, Some(proof)).await.unwrap();
    assert_eq!(Identity::load(dir.path()).unwrap().unwrap().host, host("h1"));
    serving.await.unwrap();
}
