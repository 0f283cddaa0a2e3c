# frozen_string_literal: true

# Divides its CPU time among the ways in which C code and Ruby code call each
# other. With `LATE` set, the extension is loaded when the recording has begun.

require_relative "spend"

module Parts
  MS = Spend::SLICE
  # How long the block of `with_block` takes.
  BLOCK_MS = Integer(ENV.fetch("BLOCK_MS", "1"))

  def self.cpu
    Burn.cpu(MS)
  end

  def self.without_gvl
    Burn.without_gvl(MS)
  end

  # Half of it in the block, or more if that takes longer than a millisecond.
  def self.with_block
    $in_block = 0
    Burn.with_block(MS / BLOCK_MS) { in_block }
    Spend.elsewhere("in_block", $in_block)
  end

  def self.in_block
    before = Spend.cpu
    spin(BLOCK_MS)
    $in_block += Spend.cpu - before
  end

  def self.funcall
    Burn.funcall(Parts, :called, MS)
  end

  def self.called(ms)
    Burn.cpu(ms)
  end

  def self.protect
    Burn.protect(MS) { raise "protected" }
  end

  def self.rescue
    Burn.rescue(MS) { raise "rescued" }
  end

  def self.ruby
    spin(MS)
  end

  def self.c_thread
    Spend.elsewhere("c_thread", Burn.c_thread(MS) * 1000)
  end

  def self.spin(ms)
    rest = $rounds * ms
    rest -= 1 while rest > 0
  end
end

# Global, since the block must be quick about it.
$in_block = 0
# Rounds that take a millisecond at most. What interrupts them is not counted in, so
# the best of a few.
$rounds = 300_000
best = Array.new(5) do
  before = Spend.cpu
  Parts.spin(10)
  Spend.cpu - before
end.min
# Rather too few than too many: the larger a share, the less sure it is.
$rounds = $rounds * 8_000_000 / best

require "burn" unless ENV["LATE"]
Spend.wait("ready")
require "burn"

until Spend.over?
  Spend.on("cpu") { Parts.cpu }
  Spend.on("without_gvl") { Parts.without_gvl }
  Spend.on("with_block") { Parts.with_block }
  Spend.on("funcall") { Parts.funcall }
  Spend.on("protect") { Parts.protect }
  Spend.on("rescue") { Parts.rescue }
  Spend.on("ruby") { Parts.ruby }
  Parts.c_thread
end
Spend.finished
