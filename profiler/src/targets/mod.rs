//! Which processes, which Ruby in them, and where its roots are.
