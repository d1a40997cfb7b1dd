//! Writes a report of made-up evidence, to look at: `cargo run -p drums-analysis --example page -- FILE`.

use drums_analysis::{analyse, render_html, synthetic::Scenario};

fn main() -> std::io::Result<()> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "page.html".to_owned());
    let mut s = Scenario::exp028(3);
    let h1 = s.hosts[0].0.clone();
    s.noisy.insert((h1.clone(), 2));
    s.failing.insert((h1, 5, "runc-restored".parse().expect("an arm's name")));
    s.drift = 0.1;
    let (meta, records) = s.run(1);
    let registration = s.registration();
    std::fs::write(path, render_html(&registration, &analyse(&registration, &[meta], &records)))
}
