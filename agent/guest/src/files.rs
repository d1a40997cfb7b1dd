//! Files in and out: `POST /setup/upload` and `POST /file`, as OSWorld's client calls them.

use std::{fs, io, path::Path};

use crate::http::{MAX_BODY, Request, Response, find, parse_form};

/// A form with `file_path` and `file_data` (multipart), or `?file_path=` with the bytes as the body.
pub fn upload(request: &Request) -> Response {
    let (path, bytes) = match fields(request) {
        Ok(fields) => fields,
        Err(why) => return Response::error(400, why),
    };
    let path = Path::new(&path);
    if !path.is_absolute() {
        return Response::error(400, format!("file_path {} is not absolute", path.display()));
    }
    let store = || -> io::Result<()> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(path, bytes)
    };
    match store() {
        Ok(()) => Response::text("File Uploaded"),
        Err(e) => Response::error(500, format!("cannot write {}: {e}", path.display())),
    }
}

/// A form with `file_path`; answers with the content.
pub fn download(request: &Request) -> Response {
    let form = match std::str::from_utf8(&request.body).map_err(|_| ()).and_then(|t| parse_form(t).map_err(|_| ())) {
        Ok(form) => form,
        Err(()) => return Response::error(400, "the body is not a form"),
    };
    let from_form = form.iter().find(|(n, _)| n == "file_path").map(|(_, v)| v.as_str());
    let Some(path) = from_form.or_else(|| request.query("file_path")) else {
        return Response::error(400, "file_path is required");
    };
    let read = || -> io::Result<Vec<u8>> {
        let meta = fs::metadata(path)?;
        if !meta.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        if meta.len() > MAX_BODY as u64 {
            return Err(io::Error::other(format!("larger than {MAX_BODY} bytes")));
        }
        fs::read(path)
    };
    match read() {
        Ok(body) => Response { status: 200, content_type: "application/octet-stream", body },
        Err(e) if e.kind() == io::ErrorKind::NotFound => Response::error(404, "File not found"),
        Err(e) => Response::error(500, format!("cannot read {path}: {e}")),
    }
}

fn fields(request: &Request) -> Result<(String, &[u8]), String> {
    if let Some(path) = request.query("file_path") {
        return Ok((path.to_owned(), &request.body));
    }
    let kind = request.header("content-type").unwrap_or_default();
    let boundary = kind
        .strip_prefix("multipart/form-data")
        .and_then(|rest| rest.split(';').find_map(|p| p.trim().strip_prefix("boundary=")))
        .map(|b| b.trim_matches('"'))
        .filter(|b| !b.is_empty() && b.len() <= 70)
        .ok_or("expected multipart/form-data with file_path and file_data, or ?file_path= and the bytes")?;
    let mut path = None;
    let mut data = None;
    for (name, value) in parts(&request.body, boundary)? {
        match name.as_str() {
            "file_path" => path = Some(String::from_utf8(value.to_vec()).map_err(|_| "file_path is not UTF-8")?),
            "file_data" => data = Some(value),
            _ => {}
        }
    }
    Ok((path.ok_or("file_path is required")?, data.ok_or("file_data is required")?))
}

/// The parts of a multipart body: name and content.
fn parts<'a>(body: &'a [u8], boundary: &str) -> Result<Vec<(String, &'a [u8])>, String> {
    let broken = || "the multipart body is broken".to_owned();
    let delimiter = format!("\r\n--{boundary}").into_bytes();
    // The first delimiter has no line end before it.
    let mut rest = body.strip_prefix(&delimiter[2..]).ok_or_else(broken)?;
    let mut found = Vec::new();
    loop {
        if rest.starts_with(b"--") {
            return Ok(found);
        }
        if found.len() == 16 {
            return Err("the multipart body has more than 16 parts".to_owned());
        }
        rest = rest.strip_prefix(b"\r\n").ok_or_else(broken)?;
        let head_end = find(rest, b"\r\n\r\n").ok_or_else(broken)?;
        let head = std::str::from_utf8(&rest[..head_end]).map_err(|_| broken())?;
        rest = &rest[head_end + 4..];
        let end = find(rest, &delimiter).ok_or_else(broken)?;
        found.push((part_name(head).ok_or_else(broken)?, &rest[..end]));
        rest = &rest[end + delimiter.len()..];
    }
}

fn part_name(head: &str) -> Option<String> {
    let disposition = head.split("\r\n").find(|l| l.to_ascii_lowercase().starts_with("content-disposition:"))?;
    disposition.split(';').find_map(|p| p.trim().strip_prefix("name=")).map(|n| n.trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &[u8] = b"--XX\r\nContent-Disposition: form-data; name=\"file_path\"\r\n\r\n/tmp/a\r\n--XX\r\nContent-Disposition: form-data; \
        name=\"file_data\"; filename=\"a\"\r\nContent-Type: application/octet-stream\r\n\r\n\x00\r\n--X\xff\r\n--XX--\r\n";

    fn post(kind: &str, body: &[u8]) -> Request {
        Request {
            method: "POST".into(),
            path: "/setup/upload".into(),
            query: vec![],
            headers: vec![("content-type".into(), kind.into())],
            body: body.to_vec(),
        }
    }

    #[test]
    fn a_multipart_form_gives_path_and_bytes() {
        let request = post("multipart/form-data; boundary=XX", BODY);
        assert_eq!(fields(&request).unwrap(), ("/tmp/a".to_owned(), b"\x00\r\n--X\xff".as_slice()));
    }

    #[test]
    fn broken_forms_are_refused() {
        for cut in 0..BODY.len() - 4 {
            assert!(fields(&post("multipart/form-data; boundary=XX", &BODY[..cut])).is_err(), "{cut}");
        }
        assert!(fields(&post("multipart/form-data", BODY)).is_err());
        assert!(fields(&post("text/plain", BODY)).is_err());
    }

    #[test]
    fn files_go_in_and_come_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b").display().to_string();
        let mut request = post("", b"bytes");
        request.query = vec![("file_path".into(), path.clone())];
        assert_eq!(upload(&request).status, 200);
        let ask =
            |path: &str| download(&post("application/x-www-form-urlencoded", format!("file_path={path}").as_bytes()));
        assert_eq!(ask(&path).body, b"bytes");
        assert_eq!(ask("/none/such").status, 404);
        assert_eq!(ask("/tmp").status, 500);
        request.query[0].1 = "relative".into();
        assert_eq!(upload(&request).status, 400);
    }
}
