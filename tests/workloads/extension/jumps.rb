# frozen_string_literal: true

# Leaves several activations of the interpreter at once, by all means that there
# are, all of the time.

require "burn"
require_relative "spend"

module Jumps
  DEEP = 4

  # Calls the block through C and Ruby code, `rest` times over.
  def self.down(rest, &action)
    return action.call if rest.zero?

    Burn.nest(rest) { |left| down(left, &action) }
  end

  def self.exception
    down(DEEP) { raise "out" }
  rescue RuntimeError
    nil
  end

  def self.ensured
    down(DEEP) do
      begin
        raise "out"
      ensure
        $count += 1
      end
    end
  rescue RuntimeError
    nil
  end

  def self.thrown
    catch(:out) { down(DEEP) { throw :out } }
  end

  def self.returned
    down(DEEP) { return }
  end

  def self.broken
    [1].each { down(DEEP) { break } }
    Burn.with_block(1) { break }
  end

  # Caught in C, and what it gives is no number: once more.
  def self.protected
    down(DEEP) { Burn.protect(0) { down(DEEP) { raise "out" } } } rescue nil
  end
end

$count = 0
Spend.wait("ready")
until Spend.over?
  Spend.on("jumps") do
    200.times do
      Jumps.exception
      Jumps.ensured
      Jumps.thrown
      Jumps.returned
    end
    # These burn time.
    Jumps.protected
    Jumps.broken
  end
end
Spend.finished
