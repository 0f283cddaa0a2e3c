# frozen_string_literal: true

# C code and Ruby code in everything that has a stack of its own: threads, fibers
# and, where there are any, ractors.

require "burn"
require "fiber"
require_relative "spend"

module Roots
  MS = Spend::SLICE

  def self.thread
    Thread.new { Burn.cpu(MS) }.join
  end

  # A fiber that is left from within its C code, and entered again.
  def self.fiber
    fiber = Fiber.new do
      Burn.with_block(MS) do
        spin(100_000)
        Fiber.yield
      end
      nil
    end
    fiber.resume while fiber.alive?
  end

  # A fiber in a thread.
  def self.both
    Thread.new do
      Fiber.new { Burn.cpu(MS) }.resume
    end.join
  end

  # Of the extension, only the main ractor may call anything.
  def self.ractor
    return unless defined?(Ractor)

    ractor = Ractor.new { Roots.spin(500_000) }
    ractor.respond_to?(:value) ? ractor.value : ractor.take
  end

  def self.spin(rounds)
    rounds -= 1 while rounds > 0
  end
end

Spend.wait("ready")
finish = Process.clock_gettime(Process::CLOCK_PROCESS_CPUTIME_ID, :millisecond) + Spend::CPU_MS
while Process.clock_gettime(Process::CLOCK_PROCESS_CPUTIME_ID, :millisecond) < finish
  Roots.thread
  Roots.fiber
  Roots.both
  Roots.ractor
end
Spend.finished
