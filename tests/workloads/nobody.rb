# frozen_string_literal: true

# Required first, makes the program one of the user nobody.
Process::GID.change_privilege(65534)
Process::UID.change_privilege(65534)
