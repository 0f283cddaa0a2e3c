//! From frames as the kernel half sends them to names and lines.
