# frozen_string_literal: true

# Three parts that share the CPU time 70 : 20 : 10. The program measures them
# with its own clock and says how it was at the end. `RUN_MS`: how long.

require_relative "points"

class Parts
  # Iterations of one hundredth of a round of about a second.
  UNIT = $spin * 10_000_000 / Points::SPIN_NS

  attr_reader :spent

  def initialize
    @spent = Hash.new(0)
  end

  def round
    measure(:large) { large(70 * UNIT) }
    measure(:medium) { medium(20 * UNIT) }
    measure(:small) { small(10 * UNIT) }
  end

  def measure(part)
    before = Points.cpu
    yield
    @spent[part] += Points.cpu - before
  end

  def large(n)
    i = 0
    i += 1 while i < n
  end

  def medium(n)
    i = 0
    i += 1 while i < n
  end

  def small(n)
    i = 0
    i += 1 while i < n
  end
end

parts = Parts.new
Points.ready
begun = Points.now
# Not fewer than four rounds where others use the machine.
duration = Integer(ENV.fetch("RUN_MS", "10000")) * 1_000_000
rounds = 0
while rounds < 4 || Points.now - begun < duration
  parts.round
  rounds += 1
end
parts.spent.each { |part, spent| $stdout.write("spent\t#{part}\t#{spent}\n") }
Points.finished
