//! The one reader of bytes: it knows its offset and names what is missing.
