# frozen_string_literal: true

# Ruby code that the interpreter calls by itself, or that leaves several of its
# activations at once. Each method calls `here`, a place to stop the program at:
# `Integer#<` with a Float calls a function of the C library.

require "objspace"

$spin = 1.0
0 < $spin

def here
  3.times { 0 < $spin }
end

def in_trap() here end
def in_finalizer() here end
def in_fiber() here end
def in_nested_fiber() here end
def in_thread() here end
def in_throw() here end
def in_rescue() here end
def in_ensure() here end
def in_coerce() here end
def in_comparison() here end
def in_callback() here end
def in_exit() here end
def in_tracer() here end
def in_ractor() yield end

class Weighed
  include Comparable
  attr_reader :weight

  def initialize(weight)
    @weight = weight
  end

  def <=>(other)
    in_comparison
    weight <=> other.weight
  end

  def coerce(other)
    in_coerce
    [other, 1]
  end

  def self.inherited(child)
    super
    in_callback
  end

  def self.method_added(name)
    super
    in_callback
  end
end

$stdout.write("ready\n")
$stdout.flush
$stdin.gets

trap("USR1") { in_trap }
Process.kill("USR1", Process.pid)
100.times { sleep 0.001 }

ObjectSpace.define_finalizer(Object.new, proc { in_finalizer })
10_000.times { Object.new }
GC.start

Fiber.new do
  [1].each { in_fiber }
  Fiber.yield
  Fiber.new { [1].map { in_nested_fiber } }.resume
end.tap { |fiber| 2.times { fiber.resume } }
Enumerator.new { |some| some << 1; in_fiber }.next rescue nil

Thread.new { [1].each { in_thread } }.join

catch(:out) { [1].each { [2].map { [3].each_with_index { in_throw; throw :out } } } }
begin
  [1].each { [2].each { [3].each { in_throw; raise "out" } } }
rescue RuntimeError
  in_rescue
ensure
  [1].each { in_ensure }
end
[1].each { [2].each { break } } && in_rescue

[Weighed.new(3), Weighed.new(1), Weighed.new(2)].sort.max.clamp(Weighed.new(0), Weighed.new(9))
1 + Weighed.new(1)
Class.new(Weighed) { define_method(:more) { 1 } }

TracePoint.new(:c_call) { |tp| in_tracer if tp.method_id == :upcase }.enable { "a".upcase }

if defined?(Ractor)
  Warning[:experimental] = false
  ractor = Ractor.new { [1].each { 3.times { in_ractor { 0 < 1.0 } } } }
  ractor.respond_to?(:value) ? ractor.value : ractor.take
end

at_exit do
  in_exit
  $stdout.write("finished\n")
  $stdout.flush
  $stdin.gets
end
