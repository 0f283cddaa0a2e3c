//! A flame graph: one SVG file with the script to zoom and search in it.
//!
//! Width is samples, a frame lies on its caller, and colour is the kind of
//! function. A box shows the label; its tooltip, and the line at the bottom,
//! the samples and where the function is defined.
//!
//! Frames narrower than [`NARROWEST`] of the whole are not drawn; nobody could
//! see them. Of stacks deeper than a browser can show, the middle is left out,
//! and a frame says so.

mod colours;
mod marks;

use std::io;
use std::io::Write;
use std::sync::Arc;

use inferno::flamegraph;
use inferno::flamegraph::TextTruncateDirection;
use inferno::flamegraph::color::BackgroundColor;
use inferno::flamegraph::color::Color;
use inferno::flamegraph::color::PaletteMap;
use inferno::flamegraph::color::StrokeColor;

use super::merged::Elision;
use super::merged::Merged;
use super::summary;
use super::text;
use crate::profile::Function;
use crate::profile::FunctionKind;
use crate::profile::Profile;
use crate::profile::ROOT;

/// The least share of all samples a frame must have to be drawn: a fifth of a
/// pixel of a window of 1,000.
pub const NARROWEST: f64 = 0.0002;

/// Frames drawn of one stack, at most: outermost ones, innermost ones.
const DEEPEST: (u32, u32) = (700, 300);

/// Writes a flame graph.
///
/// # Errors
/// Those of `out`.
pub fn write(profile: &Profile, mut out: impl Write) -> io::Result<()> {
    if profile.total() == 0 {
        return write_empty(profile, out);
    }
    let drawing = Drawing::new(profile);
    let lines = drawing.lines();
    let mut palette = drawing.palette();
    let mut options = flamegraph::Options::default();
    options.title = summary::headline(profile);
    let mut elements = Vec::new();
    options.subtitle = Some(drawing.subtitle(profile, &mut elements));
    options.name_type = "Frame:".to_owned();
    options.bgcolors = Some(BackgroundColor::Flat(colours::BACKGROUND));
    options.stroke_color = StrokeColor::Color(colours::BACKGROUND);
    options.text_truncate_direction = TextTruncateDirection::Right;
    options.palette_map = Some(&mut palette);
    // Narrow frames are gone already, and wide ones must not vanish with them.
    options.min_width = 0.0;
    // Should a frame be missing in the palette, let it not change colour from
    // one picture to the next.
    options.deterministic = true;

    let mut svg = Vec::new();
    flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), &mut svg)?;
    let svg = String::from_utf8(svg).map_err(io::Error::other)?;
    // Lines of a whole pixel would cover the narrow frames.
    let svg = svg.replacen(WIDE_STROKE, "stroke-width:0.4;", 1);
    let detail = |number: usize| drawing.frames.get(number)?.detail.as_deref();
    marks::replace(&svg, detail, &elements, &mut out)?;
    out.flush()
}

/// The lines between frames as inferno draws them.
const WIDE_STROKE: &str = "stroke-width:1;";

/// Columns of the subtitle before its legend, at most.
const FACTS_WIDTH: usize = 120;

/// What the frames of a key look like.
struct Figure {
    /// The label, with what folded stacks must not contain escaped.
    name: String,
    /// File and line, as XML without parentheses.
    detail: Option<String>,
    colour: Color,
    kind: FunctionKind,
}

struct Drawing {
    /// By key: the functions by their ids, then the frames made here.
    frames: Vec<Figure>,
    /// Key of what stands for a stack without frames.
    no_frames: u32,
    /// Key of what stands for outermost frames that are not drawn.
    too_narrow: u32,
    merged: Merged,
    /// Samples that a frame needs to be drawn.
    narrowest: u64,
}

impl Drawing {
    fn new(profile: &Profile) -> Self {
        let mut frames: Vec<Figure> = (profile.functions())
            .map(|(_, function)| Figure::new(function))
            .collect();
        let mark = u32::try_from(frames.len()).unwrap_or(u32::MAX);
        frames.push(Figure::marker("[frames not drawn]"));
        let no_frames = u32::try_from(frames.len()).unwrap_or(u32::MAX);
        frames.push(Figure::marker("[no frames]"));
        let too_narrow = u32::try_from(frames.len()).unwrap_or(u32::MAX);
        frames.push(Figure::marker("[too narrow to draw]"));
        let keys: Vec<u32> = (profile.locations())
            .map(|(_, location)| u32::try_from(location.function.index()).unwrap_or(u32::MAX))
            .collect();
        let (outer, inner) = DEEPEST;
        let elision = Elision { outer, inner, mark };
        let merged = Merged::new(profile, &keys, Some(elision), |_| None);
        // Counts are far from where f64 gets coarse.
        let narrowest = (profile.total() as f64 * NARROWEST).ceil() as u64;
        Self {
            frames,
            no_frames,
            too_narrow,
            merged,
            narrowest,
        }
    }

    /// The name of a frame as inferno gets it.
    fn name(&self, key: u32) -> String {
        let name = self.frames.get(key as usize).map_or("", |f| &f.name);
        format!("{name}{}{key}", marks::FRAME)
    }

    /// A folded line for every frame that is drawn and has samples of its own
    /// or of frames on it that are too narrow.
    fn lines(&self) -> Vec<String> {
        let tree = &self.merged.tree;
        let totals = self.merged.totals();
        let total = |id: u32| totals.get(id as usize).copied().unwrap_or(0);
        let drawn = |id: u32| total(id) >= self.narrowest;
        // What is left of each frame's total when its drawn children are gone.
        let mut left: Vec<u64> = totals.clone();
        for (id, node) in tree.nodes() {
            if drawn(id)
                && let Some(left) = left.get_mut(node.parent as usize)
            {
                *left = left.saturating_sub(total(id));
            }
        }
        let mut lines = Vec::new();
        for (id, _) in tree.nodes().filter(|(id, _)| drawn(*id)) {
            let count = left.get(id as usize).copied().unwrap_or(0);
            if count > 0 {
                let mut names: Vec<String> = tree.keys_up(id).map(|key| self.name(key)).collect();
                names.reverse();
                lines.push(format!("{} {count}", names.join(";")));
            }
        }
        let no_frames = self.merged.own(ROOT);
        let too_narrow = left
            .first()
            .map_or(0, |left| left.saturating_sub(no_frames));
        for (key, count) in [(self.no_frames, no_frames), (self.too_narrow, too_narrow)] {
            if count > 0 {
                lines.push(format!("{} {count}", self.name(key)));
            }
        }
        lines
    }

    fn palette(&self) -> PaletteMap {
        let mut palette = PaletteMap::default();
        // The frame of everything has no name.
        palette.insert("", colours::ALL);
        for (key, figure) in (0_u32..).zip(&self.frames) {
            palette.insert(self.name(key), figure.colour);
        }
        palette
    }

    /// The facts, what is missing, and the legend of the colours in use. The
    /// elements that it needs are added to `elements`.
    fn subtitle(&self, profile: &Profile, elements: &mut Vec<String>) -> String {
        let mut parts = summary::facts(profile);
        parts.extend(summary::losses(profile));
        let facts = parts.join(", ");
        let mut subtitle = text::shorten_end(&facts, FACTS_WIDTH).into_owned();
        let mut push = |text: &str, element: String| {
            subtitle.push_str(text);
            subtitle.push(marks::ELEMENT);
            subtitle.push_str(&elements.len().to_string());
            elements.push(element);
        };
        // What does not fit is in the tooltip, and so are all counters.
        push("", format!("<title>{}</title>", account(profile)));
        for kind in &colours::KINDS {
            if self.has(kind.kind) {
                // Ordinary spaces are run together.
                push("\u{a0}\u{a0} ", legend_entry(kind));
            }
        }
        subtitle
    }

    /// Whether there are frames of a kind.
    fn has(&self, kind: FunctionKind) -> bool {
        let of = |key: u32| self.frames.get(key as usize).map(|frame| frame.kind);
        (self.merged.tree.nodes()).any(|(_, node)| of(node.key) == Some(kind))
    }
}

impl Figure {
    fn new(function: &Function) -> Self {
        let file = text::xml(&text::plain(&function.file))
            .replace('(', "[")
            .replace(')', "]");
        let detail = match (function.kind, function.first_line) {
            (FunctionKind::CFunction, _) if &*function.file == "<cfunc>" => Some("C".to_owned()),
            _ if file.is_empty() => None,
            (_, 0) => Some(file),
            (_, line) => Some(format!("{file}:{line}")),
        };
        Self {
            name: text::folded(&function.label).into_owned(),
            detail,
            colour: colours::of(function),
            kind: function.kind,
        }
    }

    fn marker(name: &str) -> Self {
        Self::new(&Function {
            kind: FunctionKind::Marker,
            label: Arc::from(name),
            base_label: Arc::from(name),
            file: Arc::from(""),
            first_line: 0,
        })
    }
}

/// The coloured square of a kind, and its name.
fn legend_entry(kind: &colours::Kind) -> String {
    let Color { r, g, b } = kind.middle();
    let name = kind.name;
    format!(r#"<tspan fill="rgb({r},{g},{b})">■</tspan> {name}"#)
}

/// Everything a reader needs to judge the profile, a line each.
fn account(profile: &Profile) -> String {
    let lines = summary::account(profile);
    let lines: Vec<_> = lines.iter().map(|line| text::plain(line)).collect();
    text::xml(&lines.join("\n"))
}

/// Inferno makes an error of a profile without samples; it is none.
fn write_empty(profile: &Profile, mut out: impl Write) -> io::Result<()> {
    let mut facts = summary::facts(profile);
    facts.extend(summary::losses(profile));
    write!(
        out,
        r#"<?xml version="1.0" standalone="no"?>
<svg version="1.1" width="1200" height="120" viewBox="0 0 1200 120" xmlns="http://www.w3.org/2000/svg">
<style>text {{ font-family: monospace; font-size: 12px; text-anchor: middle }}</style>
<rect width="100%" height="100%" fill="rgb(250,250,250)"/>
<text x="50%" y="24" style="font-size: 17px">{}</text>
<text x="50%" y="48">{}</text>
<text x="50%" y="84">No samples: the target used no CPU while it was observed.</text>
</svg>
"#,
        text::xml(&summary::headline(profile)),
        text::xml(&facts.join(", ")),
    )?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::example;

    fn written(profile: &Profile) -> String {
        let mut out = Vec::new();
        write(profile, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    /// Texts of all elements of a name.
    fn elements<'a>(svg: &'a str, name: &str) -> Vec<&'a str> {
        let (open, close) = (format!("<{name}"), format!("</{name}>"));
        (svg.split(&open).skip(1))
            .filter_map(|rest| rest.split_once('>')?.1.split_once(&close))
            .map(|(text, _)| text)
            .collect()
    }

    #[test]
    fn title_subtitle_and_legend() {
        let svg = written(&example::profile());
        let texts = elements(&svg, "text");
        assert_eq!(texts[0], "CPU profile of puma 6.4 [shop] (pid 4242)");
        let facts = "100 samples, 10.0 s at 99 Hz, 2 threads, Ruby 3.3.8, \
             2 samples lost, 7 stacks truncated";
        assert!(texts[1].starts_with(facts), "{}", texts[1]);
        let legend: Vec<&str> = texts[1].split("</tspan> ").skip(1).collect();
        let legend: Vec<&str> = (legend.iter())
            .map(|entry| entry.split('\u{a0}').next().unwrap())
            .collect();
        assert_eq!(legend, ["Ruby", "C", "unknown"]);
        let account = elements(&svg, "title")[0];
        for line in [
            "tool: rbprof 0.1.0",
            "samples due: 102",
            "names not read: 0",
        ] {
            assert!(account.lines().any(|found| found == line), "{account}");
        }
    }

    #[test]
    fn machine_code_has_colours_of_its_own_and_its_file() {
        let mut builder = example::Builder::default();
        let deflate = "Zlib::Deflate#deflate:c@/usr/lib/ruby/zlib.so";
        let stack = [
            "main:1",
            deflate,
            "zrun(int):n@/usr/lib/ruby/zlib.so",
            "read:k",
        ];
        builder.sample(1, &stack, 3);
        let svg = written(&builder.profile);
        let texts = elements(&svg, "text");
        for kind in ["Ruby", "C", "native", "kernel"] {
            assert!(
                texts[1].contains(&format!("</tspan> {kind}")),
                "{}",
                texts[1]
            );
        }
        let tooltips = elements(&svg, "title");
        for expected in [
            "Zlib::Deflate#deflate (3 samples, 100.00%, /usr/lib/ruby/zlib.so)",
            "zrun(int) (3 samples, 100.00%, /usr/lib/ruby/zlib.so)",
            "read (3 samples, 100.00%, [kernel.kallsyms])",
        ] {
            assert!(tooltips.contains(&expected), "{expected}: {tooltips:?}");
        }
    }

    #[test]
    fn boxes_have_labels_and_tooltips_files() {
        let svg = written(&example::profile());
        let tooltips = elements(&svg, "title");
        for expected in [
            "all (100 samples, 100%)",
            "Shop::Order#total (60 samples, 60.00%, /app/lib/shop/order.rb:30)",
            "Array#map (40 samples, 40.00%, C)",
            "[stack truncated] (7 samples, 7.00%)",
            "&lt;main&gt; (60 samples, 60.00%, /app/bin/shop:1)",
        ] {
            assert!(tooltips.contains(&expected), "{expected}: {tooltips:?}");
        }
        let texts = elements(&svg, "text");
        assert!(texts.contains(&"Shop::Order#total"), "{texts:?}");
        assert!(!svg.contains([marks::FRAME, marks::ELEMENT]));
    }

    #[test]
    fn methods_of_one_name_in_two_files_are_two_frames() {
        let mut builder = example::Builder::default();
        builder.sample(1, &["main:1", "call:1@/a.rb"], 1);
        builder.sample(1, &["main:1", "call:1@/b (copy).rb"], 1);
        let svg = written(&builder.profile);
        let tooltips = elements(&svg, "title");
        assert!(tooltips.contains(&"call (1 sample, 50.00%, /a.rb:1)"));
        // The script cuts at the last parenthesis.
        assert!(tooltips.contains(&"call (1 sample, 50.00%, /b [copy].rb:1)"));
    }

    #[test]
    fn the_script_cuts_tooltips_as_we_expect() {
        let svg = written(&example::profile());
        let rule = r#"find_child(e, "title").textContent.replace(/\([^(]*\)$/,"")"#;
        assert_eq!(svg.matches(rule).count(), 2, "inferno's script has changed");
        assert!(
            svg.contains("stroke-width:0.4;"),
            "inferno's style has changed"
        );
    }

    #[test]
    fn equal_profiles_give_equal_pictures() {
        assert_eq!(written(&example::profile()), written(&example::profile()));
    }

    #[test]
    fn narrow_frames_are_not_drawn_but_counted() {
        let mut builder = example::Builder::default();
        builder.sample(1, &["main:1", "wide:1"], 9_990);
        for n in 0..10 {
            builder.sample(1, &["main:1", &format!("narrow{n}:1"), "leaf:1"], 1);
        }
        let svg = written(&builder.profile);
        assert!(svg.contains("main (10,000 samples, 100.00%"));
        assert!(svg.contains("wide (9,990 samples, 99.90%"));
        assert!(!svg.contains("narrow"));
    }

    #[test]
    fn deep_stacks_lose_their_middle_and_say_so() {
        let mut builder = example::Builder::default();
        let mut frames = vec!["f:1"; 10_000];
        frames.push("leaf:1");
        builder.sample(1, &frames, 1);
        let svg = written(&builder.profile);
        assert!(svg.contains("[frames not drawn] (1 sample, 100.00%)"));
        assert!(svg.contains("<title>leaf (1 sample"));
        assert_eq!(svg.matches("<title>f (").count(), 999);
    }

    #[test]
    fn hostile_names_stay_names() {
        let mut builder = example::Builder::default();
        builder.sample(1, &["a;</title><script>x\u{e000}5\u{1}:1"], 1);
        let svg = written(&builder.profile);
        let name = "a\\x3b&lt;/title&gt;&lt;script&gt;x\\u{e000}5\\x01 (1 sample";
        assert!(svg.contains(name), "{svg}");
    }

    #[test]
    fn nothing_is_said_to_be_nothing() {
        let svg = written(&Profile::default());
        assert!(svg.contains("No samples: the target used no CPU"));
        assert!(svg.ends_with("</svg>\n"));
    }
}
