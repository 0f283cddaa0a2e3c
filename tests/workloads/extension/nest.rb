# frozen_string_literal: true

# C code that calls a block that calls C code, `LEVELS` deep, and Ruby code at
# the bottom of it all.

require "burn"
require_relative "spend"

def bottom
  until Spend.cpu >= $end
    rest = 100_000
    rest -= 1 while rest > 0
  end
  0
end

descend = proc do |rest|
  rest.zero? ? bottom : Burn.nest(rest, &descend)
end

Spend.wait("ready")
Spend.on("nest") do
  $end = Spend.cpu + Spend::CPU_MS * 1_000_000
  Burn.nest(Integer(ENV.fetch("LEVELS")), &descend)
end
Spend.finished
