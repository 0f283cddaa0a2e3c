//! Writers over a profile.
