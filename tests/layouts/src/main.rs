//! Compares rbprof's table of layouts with generated bindings of every Ruby
//! release, for x86-64 Linux.
//!
//! There is nothing to run: every comparison is a constant whose type holds the
//! table's number and whose value the bindings' one, so that a disagreement is
//! an error of the compiler that shows both numbers and the field:
//!
//! ```text
//! expected an array with a size of 1112, found one with a size of 1104
//! ```
//!
//! The first is the table's. What the bindings lack (the inside of
//! `rb_objspace_t`, classes of 3.0 to 3.2, `ruby_global_symbols`) is not
//! compared here.

use core::mem::offset_of;

use rbprof_common::layout::ClassField;
use rbprof_common::layout::ClassNames;
use rbprof_common::layout::LAYOUTS;
use rbprof_common::layout::Layout;
use rbprof_common::layout::fixed;
use rbprof_common::layout::imemo;
use rbspy_ruby_structs as ruby;

/// The row that was checked with that release. Fails to compile where there is
/// none.
const fn row(major: u16, minor: u16, patch: u16) -> &'static Layout {
    let mut index = 0;
    while index < LAYOUTS.len() {
        let Layout { from, to, .. } = &LAYOUTS[index];
        if from.major == major
            && from.minor == minor
            && from.patch <= patch
            && to.major == major
            && to.minor == minor
            && patch <= to.patch
        {
            return &LAYOUTS[index];
        }
        index += 1;
    }
    panic!("the table has no row for this release");
}

/// The offset of a class's field from the class, or from its extension.
const fn class_field(field: ClassField) -> usize {
    match field {
        ClassField::Direct(offset) | ClassField::Behind { offset, .. } => offset as usize,
    }
}

const fn iv_tbl(names: ClassNames) -> usize {
    match names {
        ClassNames::IvarTable { iv_tbl, .. } => iv_tbl as usize,
        _ => panic!("classes of this release have a table"),
    }
}

const fn attached_object(names: ClassNames) -> usize {
    match names {
        ClassNames::Fields {
            attached_object, ..
        } => attached_object as usize,
        _ => panic!("classes of this release have fields"),
    }
}

const fn classpath(names: ClassNames) -> usize {
    match names {
        ClassNames::Fields { classpath, .. } => classpath as usize,
        _ => panic!("classes of this release have fields"),
    }
}

const fn permanent(names: ClassNames) -> usize {
    match names {
        ClassNames::Fields { permanent, .. } => permanent as usize,
        _ => panic!("classes of this release have fields"),
    }
}

/// Checks that the table's number is that of the bindings.
macro_rules! agree {
    ($table:expr, $bindings:expr) => {
        const _: [(); { $table as usize }] = [(); { $bindings as usize }];
    };
}

/// Compares what every release has.
macro_rules! release {
    ($($module:ident $major:literal $minor:literal $patch:literal jit $jit:ident objspace $($objspace:ident).+;)*) => {
        $(mod $module {
            use super::*;
            use ruby::$module as bindings;

            pub(crate) const ROW: &Layout = row($major, $minor, $patch);

            agree!(fixed::EC_VM_STACK, offset_of!(bindings::rb_execution_context_struct, vm_stack));
            agree!(
                fixed::EC_VM_STACK_SIZE,
                offset_of!(bindings::rb_execution_context_struct, vm_stack_size)
            );
            agree!(fixed::EC_CFP, offset_of!(bindings::rb_execution_context_struct, cfp));
            agree!(
                ROW.walk.ec_thread,
                offset_of!(bindings::rb_execution_context_struct, thread_ptr)
            );

            agree!(ROW.walk.cfp_size, size_of::<bindings::rb_control_frame_struct>());
            agree!(fixed::CFP_PC * 8, offset_of!(bindings::rb_control_frame_struct, pc));
            agree!(fixed::CFP_ISEQ * 8, offset_of!(bindings::rb_control_frame_struct, iseq));
            agree!(fixed::CFP_EP * 8, offset_of!(bindings::rb_control_frame_struct, ep));

            agree!(ROW.walk.thread_vm, offset_of!(bindings::rb_thread_struct, vm));
            agree!(ROW.walk.thread_ec, offset_of!(bindings::rb_thread_struct, ec));

            agree!(ROW.names.iseq_body, offset_of!(bindings::rb_iseq_struct, body));
            agree!(fixed::BODY_TYPE, offset_of!(bindings::rb_iseq_constant_body, type_));
            agree!(fixed::BODY_SIZE, offset_of!(bindings::rb_iseq_constant_body, iseq_size));
            agree!(fixed::BODY_ENCODED, offset_of!(bindings::rb_iseq_constant_body, iseq_encoded));
            agree!(
                fixed::BODY_PATH,
                offset_of!(bindings::rb_iseq_constant_body, location.pathobj)
            );
            agree!(
                ROW.names.base_label.unwrap(),
                offset_of!(bindings::rb_iseq_constant_body, location.base_label)
            );
            agree!(ROW.names.label, offset_of!(bindings::rb_iseq_constant_body, location.label));
            agree!(
                ROW.names.first_lineno,
                offset_of!(bindings::rb_iseq_constant_body, location.first_lineno)
            );
            agree!(
                ROW.names.insns_info,
                offset_of!(bindings::rb_iseq_constant_body, insns_info.body)
            );
            agree!(
                ROW.names.insns_info_size,
                offset_of!(bindings::rb_iseq_constant_body, insns_info.size)
            );
            agree!(
                ROW.names.succ_index_table,
                offset_of!(bindings::rb_iseq_constant_body, insns_info.succ_index_table)
            );
            agree!(ROW.names.parent_iseq, offset_of!(bindings::rb_iseq_constant_body, parent_iseq));
            agree!(ROW.names.local_iseq, offset_of!(bindings::rb_iseq_constant_body, local_iseq));
            agree!(ROW.names.jit_entry, offset_of!(bindings::rb_iseq_constant_body, $jit));
            agree!(ROW.names.insn_info_entry, size_of::<bindings::iseq_insn_info_entry>());
            agree!(0, offset_of!(bindings::iseq_insn_info_entry, line_no));

            agree!(fixed::METHOD_DEFINITION, offset_of!(bindings::rb_method_entry_struct, def));
            agree!(
                fixed::METHOD_CALLED_ID,
                offset_of!(bindings::rb_method_entry_struct, called_id)
            );
            agree!(fixed::METHOD_OWNER, offset_of!(bindings::rb_method_entry_struct, owner));
            agree!(
                fixed::DEFINITION_ISEQ,
                offset_of!(bindings::rb_method_definition_struct, body.iseq.iseqptr)
            );
            agree!(
                fixed::DEFINITION_ID,
                offset_of!(bindings::rb_method_definition_struct, original_id)
            );

            agree!(ROW.names.last_operator_id, bindings::ruby_method_ids_tLAST_OP_ID);
            agree!(ROW.names.singleton_flag, bindings::ruby_fl_type_RUBY_FL_SINGLETON);
            agree!(imemo::SVAR, bindings::imemo_type_imemo_svar);
            agree!(imemo::MENT, bindings::imemo_type_imemo_ment);
            agree!(imemo::ISEQ, bindings::imemo_type_imemo_iseq);

            agree!(
                ROW.collector.vm_objspace.x86_64.unwrap(),
                offset_of!(bindings::rb_vm_struct, $($objspace).+)
            );
        })*
    };
}

/// Where one global holds the context, and a little beyond: the thread's native
/// handle.
macro_rules! thread_ids {
    ($($module:ident)*) => {
        $(agree!(
            $module::ROW.walk.thread_id,
            offset_of!(ruby::$module::rb_thread_struct, thread_id)
        );)*
    };
}

/// What tells which thread collects.
macro_rules! ractors {
    ($($module:ident)*) => {
        $(
            agree!(
                $module::ROW.collector.ractors.unwrap().thread_ractor,
                offset_of!(ruby::$module::rb_thread_struct, ractor)
            );
            agree!(
                $module::ROW.collector.ractors.unwrap().vm_ractors,
                offset_of!(ruby::$module::rb_vm_struct, ractor.cnt)
            );
            agree!(
                $module::ROW.collector.ractors.unwrap().running_ec.x86_64.unwrap(),
                offset_of!(ruby::$module::rb_ractor_struct, threads.running_ec)
            );
            agree!(
                $module::ROW.collector.ractors.unwrap().vm_lock_owner.x86_64.unwrap(),
                offset_of!(ruby::$module::rb_vm_struct, ractor.sync.lock_owner)
            );
        )*
    };
}

/// Frames that machine code runs.
macro_rules! jit_returns {
    ($($module:ident)*) => {
        $(agree!(
            $module::ROW.walk.jit_return,
            offset_of!(ruby::$module::rb_control_frame_struct, jit_return)
        );)*
    };
}

/// Classes up to 2.7: their extension is a structure of its own.
macro_rules! old_classes {
    ($($module:ident)*) => {
        $(
            agree!(
                class_field($module::ROW.names.origin),
                offset_of!(ruby::$module::rb_classext_struct, origin_)
            );
            agree!(
                iv_tbl($module::ROW.names.class_names),
                offset_of!(ruby::$module::rb_classext_struct, iv_tbl)
            );
        )*
    };
}

/// Classes from 3.3 on: their extension lies right behind them.
macro_rules! classes {
    ($($module:ident m_tbl $($m_tbl:ident).+;)*) => {
        $(
            agree!(
                class_field($module::ROW.names.method_table),
                offset_of!(ruby::$module::RClass_and_rb_classext_t, $($m_tbl).+)
            );
            agree!(
                class_field($module::ROW.names.origin),
                offset_of!(ruby::$module::RClass_and_rb_classext_t, classext.origin_)
            );
            agree!(
                attached_object($module::ROW.names.class_names),
                offset_of!(
                    ruby::$module::RClass_and_rb_classext_t,
                    classext.as_.singleton_class.attached_object
                )
            );
            agree!(
                classpath($module::ROW.names.class_names),
                offset_of!(ruby::$module::RClass_and_rb_classext_t, classext.classpath)
            );
            // Its first bit is `permanent_classpath`.
            agree!(
                permanent($module::ROW.names.class_names),
                offset_of!(ruby::$module::RClass_and_rb_classext_t, classext._bitfield_1)
            );
        )*
    };
}

release! {
    ruby_2_6_0 2 6 0 jit jit_func objspace objspace;
    ruby_2_6_1 2 6 1 jit jit_func objspace objspace;
    ruby_2_6_2 2 6 2 jit jit_func objspace objspace;
    ruby_2_6_3 2 6 3 jit jit_func objspace objspace;
    ruby_2_6_4 2 6 4 jit jit_func objspace objspace;
    ruby_2_6_5 2 6 5 jit jit_func objspace objspace;
    ruby_2_6_6 2 6 6 jit jit_func objspace objspace;
    ruby_2_6_7 2 6 7 jit jit_func objspace objspace;
    ruby_2_6_8 2 6 8 jit jit_func objspace objspace;
    ruby_2_6_9 2 6 9 jit jit_func objspace objspace;
    ruby_2_6_10 2 6 10 jit jit_func objspace objspace;
    ruby_2_7_0 2 7 0 jit jit_func objspace objspace;
    ruby_2_7_1 2 7 1 jit jit_func objspace objspace;
    ruby_2_7_2 2 7 2 jit jit_func objspace objspace;
    ruby_2_7_3 2 7 3 jit jit_func objspace objspace;
    ruby_2_7_4 2 7 4 jit jit_func objspace objspace;
    ruby_2_7_5 2 7 5 jit jit_func objspace objspace;
    ruby_2_7_6 2 7 6 jit jit_func objspace objspace;
    ruby_2_7_7 2 7 7 jit jit_func objspace objspace;
    ruby_2_7_8 2 7 8 jit jit_func objspace objspace;
    ruby_3_0_0 3 0 0 jit jit_func objspace objspace;
    ruby_3_0_1 3 0 1 jit jit_func objspace objspace;
    ruby_3_0_2 3 0 2 jit jit_func objspace objspace;
    ruby_3_0_3 3 0 3 jit jit_func objspace objspace;
    ruby_3_0_4 3 0 4 jit jit_func objspace objspace;
    ruby_3_0_5 3 0 5 jit jit_func objspace objspace;
    ruby_3_0_6 3 0 6 jit jit_func objspace objspace;
    ruby_3_0_7 3 0 7 jit jit_func objspace objspace;
    ruby_3_1_0 3 1 0 jit jit_func objspace objspace;
    ruby_3_1_1 3 1 1 jit jit_func objspace objspace;
    ruby_3_1_2 3 1 2 jit jit_func objspace objspace;
    ruby_3_1_3 3 1 3 jit jit_func objspace objspace;
    ruby_3_1_4 3 1 4 jit jit_func objspace objspace;
    ruby_3_1_5 3 1 5 jit jit_func objspace objspace;
    ruby_3_1_6 3 1 6 jit jit_func objspace objspace;
    ruby_3_1_7 3 1 7 jit jit_func objspace objspace;
    ruby_3_2_0 3 2 0 jit jit_func objspace objspace;
    ruby_3_2_1 3 2 1 jit jit_func objspace objspace;
    ruby_3_2_2 3 2 2 jit jit_func objspace objspace;
    ruby_3_2_3 3 2 3 jit jit_func objspace objspace;
    ruby_3_2_4 3 2 4 jit jit_func objspace objspace;
    ruby_3_2_5 3 2 5 jit jit_func objspace objspace;
    ruby_3_2_6 3 2 6 jit jit_func objspace objspace;
    ruby_3_2_7 3 2 7 jit jit_func objspace objspace;
    ruby_3_2_8 3 2 8 jit jit_func objspace objspace;
    ruby_3_2_9 3 2 9 jit jit_func objspace objspace;
    ruby_3_2_10 3 2 10 jit jit_func objspace objspace;
    ruby_3_2_11 3 2 11 jit jit_func objspace objspace;
    ruby_3_3_0 3 3 0 jit jit_entry objspace objspace;
    ruby_3_3_1 3 3 1 jit jit_entry objspace objspace;
    ruby_3_3_2 3 3 2 jit jit_entry objspace objspace;
    ruby_3_3_3 3 3 3 jit jit_entry objspace objspace;
    ruby_3_3_4 3 3 4 jit jit_entry objspace objspace;
    ruby_3_3_5 3 3 5 jit jit_entry objspace objspace;
    ruby_3_3_6 3 3 6 jit jit_entry objspace objspace;
    ruby_3_3_7 3 3 7 jit jit_entry objspace objspace;
    ruby_3_3_8 3 3 8 jit jit_entry objspace objspace;
    ruby_3_3_9 3 3 9 jit jit_entry objspace objspace;
    ruby_3_3_10 3 3 10 jit jit_entry objspace objspace;
    ruby_3_3_11 3 3 11 jit jit_entry objspace objspace;
    ruby_3_3_12 3 3 12 jit jit_entry objspace objspace;
    ruby_3_3_13 3 3 13 jit jit_entry objspace objspace;
    ruby_3_4_0 3 4 0 jit jit_entry objspace gc.objspace;
    ruby_3_4_1 3 4 1 jit jit_entry objspace gc.objspace;
    ruby_3_4_2 3 4 2 jit jit_entry objspace gc.objspace;
    ruby_3_4_3 3 4 3 jit jit_entry objspace gc.objspace;
    ruby_3_4_4 3 4 4 jit jit_entry objspace gc.objspace;
    ruby_3_4_5 3 4 5 jit jit_entry objspace gc.objspace;
    ruby_3_4_6 3 4 6 jit jit_entry objspace gc.objspace;
    ruby_3_4_7 3 4 7 jit jit_entry objspace gc.objspace;
    ruby_3_4_8 3 4 8 jit jit_entry objspace gc.objspace;
    ruby_3_4_9 3 4 9 jit jit_entry objspace gc.objspace;
    ruby_3_4_10 3 4 10 jit jit_entry objspace gc.objspace;
    ruby_3_4_11 3 4 11 jit jit_entry objspace gc.objspace;
    ruby_3_4_12 3 4 12 jit jit_entry objspace gc.objspace;
    ruby_4_0_0 4 0 0 jit jit_entry objspace gc.objspace;
    ruby_4_0_1 4 0 1 jit jit_entry objspace gc.objspace;
    ruby_4_0_2 4 0 2 jit jit_entry objspace gc.objspace;
    ruby_4_0_3 4 0 3 jit jit_entry objspace gc.objspace;
    ruby_4_0_4 4 0 4 jit jit_entry objspace gc.objspace;
    ruby_4_0_5 4 0 5 jit jit_entry objspace gc.objspace;
    ruby_4_0_6 4 0 6 jit jit_entry objspace gc.objspace;
    ruby_4_0_7 4 0 7 jit jit_entry objspace gc.objspace;
    ruby_4_0_8 4 0 8 jit jit_entry objspace gc.objspace;
    ruby_4_0_9 4 0 9 jit jit_entry objspace gc.objspace;
}

thread_ids! {
    ruby_2_6_0 ruby_2_6_1 ruby_2_6_2 ruby_2_6_3 ruby_2_6_4 ruby_2_6_5 ruby_2_6_6 ruby_2_6_7 ruby_2_6_8 ruby_2_6_9 ruby_2_6_10
    ruby_2_7_0 ruby_2_7_1 ruby_2_7_2 ruby_2_7_3 ruby_2_7_4 ruby_2_7_5 ruby_2_7_6 ruby_2_7_7 ruby_2_7_8
    ruby_3_0_0 ruby_3_0_1 ruby_3_0_2 ruby_3_0_3 ruby_3_0_4 ruby_3_0_5 ruby_3_0_6 ruby_3_0_7
    ruby_3_1_0 ruby_3_1_1 ruby_3_1_2 ruby_3_1_3 ruby_3_1_4 ruby_3_1_5 ruby_3_1_6 ruby_3_1_7
}

jit_returns! {
    ruby_3_1_0 ruby_3_1_1 ruby_3_1_2 ruby_3_1_3 ruby_3_1_4 ruby_3_1_5 ruby_3_1_6 ruby_3_1_7
    ruby_3_2_0 ruby_3_2_1 ruby_3_2_2 ruby_3_2_3 ruby_3_2_4 ruby_3_2_5 ruby_3_2_6 ruby_3_2_7 ruby_3_2_8 ruby_3_2_9 ruby_3_2_10 ruby_3_2_11
    ruby_3_3_0 ruby_3_3_1 ruby_3_3_2 ruby_3_3_3 ruby_3_3_4 ruby_3_3_5 ruby_3_3_6 ruby_3_3_7 ruby_3_3_8 ruby_3_3_9 ruby_3_3_10 ruby_3_3_11 ruby_3_3_12 ruby_3_3_13
    ruby_3_4_0 ruby_3_4_1 ruby_3_4_2 ruby_3_4_3 ruby_3_4_4 ruby_3_4_5 ruby_3_4_6 ruby_3_4_7 ruby_3_4_8 ruby_3_4_9 ruby_3_4_10 ruby_3_4_11 ruby_3_4_12
    ruby_4_0_0 ruby_4_0_1 ruby_4_0_2 ruby_4_0_3 ruby_4_0_4 ruby_4_0_5 ruby_4_0_6 ruby_4_0_7 ruby_4_0_8 ruby_4_0_9
}

ractors! {
    ruby_3_0_0 ruby_3_0_1 ruby_3_0_2 ruby_3_0_3 ruby_3_0_4 ruby_3_0_5 ruby_3_0_6 ruby_3_0_7
    ruby_3_1_0 ruby_3_1_1 ruby_3_1_2 ruby_3_1_3 ruby_3_1_4 ruby_3_1_5 ruby_3_1_6 ruby_3_1_7
    ruby_3_2_0 ruby_3_2_1 ruby_3_2_2 ruby_3_2_3 ruby_3_2_4 ruby_3_2_5 ruby_3_2_6 ruby_3_2_7 ruby_3_2_8 ruby_3_2_9 ruby_3_2_10 ruby_3_2_11
    ruby_3_3_0 ruby_3_3_1 ruby_3_3_2 ruby_3_3_3 ruby_3_3_4 ruby_3_3_5 ruby_3_3_6 ruby_3_3_7 ruby_3_3_8 ruby_3_3_9 ruby_3_3_10 ruby_3_3_11 ruby_3_3_12 ruby_3_3_13
    ruby_3_4_0 ruby_3_4_1 ruby_3_4_2 ruby_3_4_3 ruby_3_4_4 ruby_3_4_5 ruby_3_4_6 ruby_3_4_7 ruby_3_4_8 ruby_3_4_9 ruby_3_4_10 ruby_3_4_11 ruby_3_4_12
    ruby_4_0_0 ruby_4_0_1 ruby_4_0_2 ruby_4_0_3 ruby_4_0_4 ruby_4_0_5 ruby_4_0_6 ruby_4_0_7 ruby_4_0_8 ruby_4_0_9
}

old_classes! {
    ruby_2_6_0 ruby_2_6_1 ruby_2_6_2 ruby_2_6_3 ruby_2_6_4 ruby_2_6_5 ruby_2_6_6 ruby_2_6_7 ruby_2_6_8 ruby_2_6_9 ruby_2_6_10
    ruby_2_7_0 ruby_2_7_1 ruby_2_7_2 ruby_2_7_3 ruby_2_7_4 ruby_2_7_5 ruby_2_7_6 ruby_2_7_7 ruby_2_7_8
}

classes! {
    ruby_3_3_0 m_tbl rclass.m_tbl;
    ruby_3_3_1 m_tbl rclass.m_tbl;
    ruby_3_3_2 m_tbl rclass.m_tbl;
    ruby_3_3_3 m_tbl rclass.m_tbl;
    ruby_3_3_4 m_tbl rclass.m_tbl;
    ruby_3_3_5 m_tbl rclass.m_tbl;
    ruby_3_3_6 m_tbl rclass.m_tbl;
    ruby_3_3_7 m_tbl rclass.m_tbl;
    ruby_3_3_8 m_tbl rclass.m_tbl;
    ruby_3_3_9 m_tbl rclass.m_tbl;
    ruby_3_3_10 m_tbl rclass.m_tbl;
    ruby_3_3_11 m_tbl rclass.m_tbl;
    ruby_3_3_12 m_tbl rclass.m_tbl;
    ruby_3_3_13 m_tbl rclass.m_tbl;
    ruby_3_4_0 m_tbl rclass.m_tbl;
    ruby_3_4_1 m_tbl rclass.m_tbl;
    ruby_3_4_2 m_tbl rclass.m_tbl;
    ruby_3_4_3 m_tbl rclass.m_tbl;
    ruby_3_4_4 m_tbl rclass.m_tbl;
    ruby_3_4_5 m_tbl rclass.m_tbl;
    ruby_3_4_6 m_tbl rclass.m_tbl;
    ruby_3_4_7 m_tbl rclass.m_tbl;
    ruby_3_4_8 m_tbl rclass.m_tbl;
    ruby_3_4_9 m_tbl rclass.m_tbl;
    ruby_3_4_10 m_tbl rclass.m_tbl;
    ruby_3_4_11 m_tbl rclass.m_tbl;
    ruby_3_4_12 m_tbl rclass.m_tbl;
    ruby_4_0_0 m_tbl classext.m_tbl;
    ruby_4_0_1 m_tbl classext.m_tbl;
    ruby_4_0_2 m_tbl classext.m_tbl;
    ruby_4_0_3 m_tbl classext.m_tbl;
    ruby_4_0_4 m_tbl classext.m_tbl;
    ruby_4_0_5 m_tbl classext.m_tbl;
    ruby_4_0_6 m_tbl classext.m_tbl;
    ruby_4_0_7 m_tbl classext.m_tbl;
    ruby_4_0_8 m_tbl classext.m_tbl;
    ruby_4_0_9 m_tbl classext.m_tbl;
}

fn main() {}
