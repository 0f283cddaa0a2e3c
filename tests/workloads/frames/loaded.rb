# frozen_string_literal: true

def loaded
  ::Points.at("loaded"); i = 0; i += 1 while i < $spin; ::Points.done
end

[1].each { loaded }
