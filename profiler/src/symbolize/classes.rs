//! Names of classes and modules.

use std::sync::Arc;

use rbprof_common::layout::ClassNames;
use rbprof_common::layout::NameLayout;
use rbprof_common::layout::fixed;
use rbprof_common::layout::object_type;

use super::evidence::Reader;
use super::evidence::Unreadable;
use super::hidden_ivars::Hidden;
use super::hidden_ivars::HiddenIvars;
use super::method_table;
use super::methods::Method;
use super::strings;
use crate::memory::TargetMemory;

/// The class a method is shown with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    /// Its permanent name: `Foo::Bar`.
    pub(super) path: Arc<str>,
    /// Whether the method is one of the class itself.
    pub(super) singleton: bool,
}

/// Reads the names of classes.
#[derive(Debug)]
pub(super) struct Classes {
    hidden: HiddenIvars,
}

impl Classes {
    /// For a process with the VM at `vm`, if that is known.
    pub(super) fn new(vm: Option<u64>) -> Self {
        Self {
            hidden: HiddenIvars::new(vm),
        }
    }

    /// What to show before the name of `method`: `None` for one of an anonymous
    /// class, and of the singleton class of a plain object.
    ///
    /// A class that has no such method is not believed to be its owner: when
    /// garbage is collected, a dead method entry may stay as it was for longer
    /// than its class, and point at what has come in the place of that. So a
    /// method loses its class when it is removed while it runs.
    pub(super) fn owner<M: TargetMemory>(
        &mut self,
        reader: &mut Reader<'_, M>,
        layout: &NameLayout,
        method: &Method,
    ) -> Result<Option<Owner>, Unreadable> {
        if layout.class_names == ClassNames::Unknown {
            return Ok(None);
        }
        let mut class = method.owner;
        let mut flags = reader.masked(class, object_type::MASK | layout.singleton_flag)?;
        if flags & object_type::MASK == object_type::ICLASS {
            class = reader.word(class.wrapping_add(fixed::OBJECT_CLASS))?;
            flags = reader.masked(class, object_type::MASK | layout.singleton_flag)?;
        }
        method_table::check(reader, layout, class, method)?;
        let singleton = match flags & object_type::MASK {
            object_type::CLASS => flags & layout.singleton_flag != 0,
            // The same flag means something else for a module.
            object_type::MODULE => false,
            _ => return Err(Unreadable),
        };
        if singleton {
            let Some(attached) = self.attached_object(reader, layout, class)? else {
                return Ok(None);
            };
            match reader.masked(attached, object_type::MASK)? {
                object_type::CLASS | object_type::MODULE => class = attached,
                _ => return Ok(None),
            }
        }
        let Some(string) = self.permanent_path(reader, layout, class)? else {
            return Ok(None);
        };
        let path = strings::text(reader, layout, string)?;
        Ok(Some(Owner { path, singleton }))
    }

    /// The string that is the permanent name of a class.
    fn permanent_path<M: TargetMemory>(
        &mut self,
        reader: &mut Reader<'_, M>,
        layout: &NameLayout,
        class: u64,
    ) -> Result<Option<u64>, Unreadable> {
        let ClassNames::Fields {
            classpath,
            permanent,
            permanent_bit,
            ..
        } = layout.class_names
        else {
            return self.hidden.get(reader, layout, class, Hidden::ClassPath);
        };
        // As a bit of the word that the byte is in.
        let byte = class.wrapping_add(u64::from(permanent));
        let bit = u64::from(permanent_bit) << (byte % 8 * 8);
        let permanent = reader.masked(byte & !7, bit)? != 0;
        let path = reader.word(class.wrapping_add(u64::from(classpath)))?;
        Ok((permanent && path != 0).then_some(path))
    }

    /// The object a singleton class belongs to.
    fn attached_object<M: TargetMemory>(
        &mut self,
        reader: &mut Reader<'_, M>,
        layout: &NameLayout,
        class: u64,
    ) -> Result<Option<u64>, Unreadable> {
        let ClassNames::Fields {
            attached_object, ..
        } = layout.class_names
        else {
            return self.hidden.get(reader, layout, class, Hidden::Attached);
        };
        let object = reader.word(class.wrapping_add(u64::from(attached_object)))?;
        Ok((object != 0).then_some(object))
    }
}
