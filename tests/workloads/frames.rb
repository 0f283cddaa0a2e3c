# frozen_string_literal: true

# Stacks of every shape that Ruby has, each held for a moment. See points.rb. With
# `NO_COLLECTOR` set, no garbage is collected meanwhile.

require_relative "points"

GC.disable if ENV["NO_COLLECTOR"]

at_exit do
  Points.at("at_exit"); i = 0; i += 1 while i < $spin; Points.done
  Points.finished
end

Points.ready

Points.at("main"); i = 0; i += 1 while i < $spin; Points.done

# --- Methods of classes and modules -----------------------------------------

class Shapes
  def outer
    middle(1)
  end

  def middle(one)
    one + inner {
      2
    }
  end

  def inner
    Points.at("nesting"); i = 0; i += 1 while i < $spin; Points.done
    yield
  end

  def self.of_class
    Points.at("singleton"); i = 0; i += 1 while i < $spin; Points.done
  end

  class << self
    def in_singleton_class
      [1].each { Points.at("class << self"); i = 0; i += 1 while i < $spin; Points.done }
    end
  end

  class Inner
    def initialize
      Points.at("initialize"); i = 0; i += 1 while i < $spin; Points.done
    end

    def deepest
      Points.at("nested class"); i = 0; i += 1 while i < $spin; Points.done
    end
  end
end

class ShapesChild < Shapes
  def middle(one)
    super
  end
end

Shapes.new.outer
Shapes.of_class
Shapes.in_singleton_class
ShapesChild.of_class
ShapesChild.new.outer
Shapes::Inner.new.deepest

module Helpers
  module_function

  def helper
    Points.at("module function"); i = 0; i += 1 while i < $spin; Points.done
  end
end

class UsesHelpers
  include Helpers

  def use
    helper
  end
end

Helpers.helper
UsesHelpers.new.use

module Itself
  extend self

  def selfish
    Points.at("extend self"); i = 0; i += 1 while i < $spin; Points.done
  end
end

Itself.selfish

object = Object.new
def object.alone
  Points.at("singleton of an object"); i = 0; i += 1 while i < $spin; Points.done
end
object.alone
object.define_singleton_method(:defined_alone) do
  Points.at("define_singleton_method"); i = 0; i += 1 while i < $spin; Points.done
end
object.defined_alone

module Refined
  refine String do
    def refined
      Points.at("refinement"); i = 0; i += 1 while i < $spin; Points.done
    end
  end
end

using Refined
"text".refined

class Defined
  define_method(:with_block) do |argument = 1|
    argument.then { Points.at("define_method"); i = 0; i += 1 while i < $spin; Points.done }
  end

  def original
    Points.at("alias"); i = 0; i += 1 while i < $spin; Points.done
  end
  alias other_name original
  alias_method :third_name, :original
  define_method(:fourth_name, instance_method(:original))

  def method_missing(name, *arguments)
    return super unless name == :missing

    Points.at("method_missing"); i = 0; i += 1 while i < $spin; Points.done
  end

  def respond_to_missing?(name, all = false)
    name == :missing || super
  end

  def self.const_missing(name)
    Points.at("const_missing"); i = 0; i += 1 while i < $spin; Points.done
    name
  end

  def self.inherited(child)
    super
    Points.at("inherited"); i = 0; i += 1 while i < $spin; Points.done
  end

  def self.name
    "Fake"
  end
end

defined = Defined.new
defined.with_block
defined.original
defined.other_name
defined.third_name
defined.fourth_name
defined.missing
Defined::NotThere
class DefinedChild < Defined; end

module Prepended
  def value(*)
    super
  end
end

class Chained
  def value(one = 1)
    Points.at("super"); i = 0; i += 1 while i < $spin; Points.done
    one
  end
end

class ChainedChild < Chained
  prepend Prepended

  define_method(:value) { |one = 2| super(one) }
end

ChainedChild.new.value

anonymous = Class.new(Shapes) do
  def nameless
    [1].each { Points.at("anonymous class"); i = 0; i += 1 while i < $spin; Points.done }
  end

  def self.nameless_singleton
    Points.at("singleton of an anonymous class"); i = 0; i += 1 while i < $spin; Points.done
  end
end
anonymous.new.nameless
anonymous.nameless_singleton
anonymous.new.outer

Late = Class.new do
  def named_late
    Points.at("named late"); i = 0; i += 1 while i < $spin; Points.done
  end
end
Late.new.named_late

Point2 = Struct.new(:x, :y) do
  def length
    Points.at("struct"); i = 0; i += 1 while i < $spin; Points.done
  end
end
Point2.new(1, 2).length

class Shapes
  Points.at("class body"); i = 0; i += 1 while i < $spin; Points.done

  module Module
    [1].each { Points.at("module body"); i = 0; i += 1 while i < $spin; Points.done }
  end

  class << self
    Points.at("singleton class body"); i = 0; i += 1 while i < $spin; Points.done
  end
end

class Bare < BasicObject
  def bare
    ::Points.at("basic object"); i = 0; i += 1 while i < $spin; ::Points.done
  end
end
Bare.new.bare

# --- Blocks in methods written in C -----------------------------------------

class Blocks
  include Enumerable

  def each
    yield 1
  end

  def to_s
    Points.at("to_s"); i = 0; i += 1 while i < $spin; Points.done
    "blocks"
  end

  def ==(other)
    Points.at("=="); i = 0; i += 1 while i < $spin; Points.done
    super
  end

  def <=>(other)
    Points.at("<=>"); i = 0; i += 1 while i < $spin; Points.done
    0
  end

  def hash
    Points.at("hash"); i = 0; i += 1 while i < $spin; Points.done
    7
  end

  def call_me(*)
    Points.at("call_me"); i = 0; i += 1 while i < $spin; Points.done
    1
  end

  def [](key)
    Points.at("[]"); i = 0; i += 1 while i < $spin; Points.done
    key
  end

  def value=(value)
    Points.at("value="); i = 0; i += 1 while i < $spin; Points.done
  end

  def !
    Points.at("!"); i = 0; i += 1 while i < $spin; Points.done
    false
  end

  def run
    [1].each { Points.at("Array#each"); i = 0; i += 1 while i < $spin; Points.done }
    [1].map do |one|
      one + 1
      Points.at("Array#map"); i = 0; i += 1 while i < $spin; Points.done
    end
    (1..2).inject { |sum, n| Points.at("inject"); i = 0; i += 1 while i < $spin; Points.done; sum + n }
    [1, 2].sort_by { |n| Points.at("sort_by"); i = 0; i += 1 while i < $spin; Points.done; n }
    [2, 1].sort { |a, b| Points.at("sort"); i = 0; i += 1 while i < $spin; Points.done; a <=> b }
    { 1 => 2 }.each { |k, v| Points.at("Hash#each"); i = 0; i += 1 while i < $spin; Points.done }
    1.times { Points.at("times"); i = 0; i += 1 while i < $spin; Points.done }
    1.upto(1) { Points.at("upto"); i = 0; i += 1 while i < $spin; Points.done }
    loop { Points.at("loop"); i = 0; i += 1 while i < $spin; Points.done; break }
    tap { Points.at("tap"); i = 0; i += 1 while i < $spin; Points.done }
    [0].fill { Points.at("fill"); i = 0; i += 1 while i < $spin; Points.done }
    each_with_index { |n, at| Points.at("each_with_index"); i = 0; i += 1 while i < $spin; Points.done }
    each_slice(1).each_with_object([]) { |n, to| Points.at("enumerators"); i = 0; i += 1 while i < $spin; Points.done }
    "a".gsub(/a/) { Points.at("gsub"); i = 0; i += 1 while i < $spin; Points.done; "b" }
    Hash.new { |hash, key| Points.at("Hash default"); i = 0; i += 1 while i < $spin; Points.done; key }[1]
    catch(:done) { Points.at("catch"); i = 0; i += 1 while i < $spin; Points.done; throw :done }
    Dir.chdir("/") { Points.at("Dir.chdir"); i = 0; i += 1 while i < $spin; Points.done }
    instance_exec(1) { |one| Points.at("instance_exec"); i = 0; i += 1 while i < $spin; Points.done }
    self.class.class_exec { Points.at("class_exec"); i = 0; i += 1 while i < $spin; Points.done }
    [self].each(&:call_me)
    [1].map(&method(:call_me))
    send(:call_me)
    public_send(:call_me)
    method(:call_me).call
    Blocks.instance_method(:call_me).bind(self).call
    ->(one) { Points.at("lambda"); i = 0; i += 1 while i < $spin; Points.done }.call(1)
    proc { Points.at("proc"); i = 0; i += 1 while i < $spin; Points.done }.()
    "#{self}"
    [self].include?(Blocks.allocate)
    [self, self].max
    { self => 1 }
    self[1]
    self.value = 1
    !self
    lazy.map { |n| Points.at("lazy"); i = 0; i += 1 while i < $spin; Points.done; n }.first(1)
  end

  def nest
    yield
  end
end

Blocks.new.run

source = +"class Blocks\n def nested_blocks\n"
60.times { |n| source << "#{'nest {' if n.zero?}#{'nest {' unless n.zero?}\n" }
source << "Points.at('60 blocks'); i = 0; i += 1 while i < $spin; Points.done\n"
source << "}\n" * 60 << "end\nend\n"
eval(source, TOPLEVEL_BINDING, "/generated/nested.rb", 100)
Blocks.new.nested_blocks

# --- Code from strings ------------------------------------------------------

class Evals
  SPIN = 'Points.at("%s"); i = 0; i += 1 while i < $spin; Points.done'

  def run
    eval(format(SPIN, "eval"))
    eval("\n\n[1].each do\n#{format(SPIN, 'eval with a file')}\nend", binding, "/generated/eval.rb", 10)
    binding.eval(format(SPIN, "Binding#eval"), "(template)", 7)
    instance_eval(format(SPIN, "instance_eval of a string"), "/generated/instance.rb", 3)
    instance_eval { Points.at("instance_eval"); i = 0; i += 1 while i < $spin; Points.done }
    generated
    Class.new.class_eval { Points.at("class_eval"); i = 0; i += 1 while i < $spin; Points.done }
  end

  class_eval <<~RUBY, __FILE__, __LINE__ + 1
    def generated
      eval("[1].each { " + format(SPIN, "class_eval of a string") + " }")
    end
  RUBY
end

Evals.new.run

# --- Clauses ----------------------------------------------------------------

class Clauses
  def in_rescue
    raise "a"
  rescue RuntimeError
    Points.at("rescue"); i = 0; i += 1 while i < $spin; Points.done
  end

  def in_ensure
    1
  ensure
    Points.at("ensure"); i = 0; i += 1 while i < $spin; Points.done
  end

  def in_ensure_of_failure
    [1].each do
      raise "a"
    ensure
      Points.at("ensure of a failure"); i = 0; i += 1 while i < $spin; Points.done
    end
  rescue RuntimeError => e
    [e].each { Points.at("block in rescue"); i = 0; i += 1 while i < $spin; Points.done }
  end

  def rescue_in_rescue
    raise "a"
  rescue RuntimeError
    begin
      raise "b"
    rescue RuntimeError
      [1].each do
        raise "c"
      rescue RuntimeError
        Points.at("rescue in rescue"); i = 0; i += 1 while i < $spin; Points.done
      end
    end
  end

  def calls_from_rescue
    raise "a"
  rescue RuntimeError
    in_rescue
  else
    1
  ensure
    in_ensure
  end

  def thrown
    catch(:out) do
      throw :out
    ensure
      Points.at("ensure of a throw"); i = 0; i += 1 while i < $spin; Points.done
    end
  end

  def broken
    [1].each do
      begin
        break
      ensure
        Points.at("ensure of a break"); i = 0; i += 1 while i < $spin; Points.done
      end
    end
  end
end

clauses = Clauses.new
clauses.in_rescue
clauses.in_ensure
clauses.in_ensure_of_failure
clauses.rescue_in_rescue
clauses.calls_from_rescue
clauses.thrown
clauses.broken
begin
  raise "a"
rescue RuntimeError
  Points.at("rescue in main"); i = 0; i += 1 while i < $spin; Points.done
end

# --- Names ------------------------------------------------------------------

class Größe
  def länge_数
    [1].each { Points.at("UTF-8"); i = 0; i += 1 while i < $spin; Points.done }
  end

  def self.größer
    Points.at("UTF-8 singleton"); i = 0; i += 1 while i < $spin; Points.done
  end
end
Größe.new.länge_数
Größe.größer

eval("class Names\n def \xA4\xA2\n [1].each { Points.at('EUC-JP'); i = 0; i += 1 while i < $spin; Points.done }\n end\nend"
  .dup.force_encoding("EUC-JP"), TOPLEVEL_BINDING, "/generated/euc.rb", 1)
Names.new.send("\xA4\xA2".dup.force_encoding("EUC-JP"))
eval("class Names\n def \xFF\xFEa\n Points.at('binary'); i = 0; i += 1 while i < $spin; Points.done\n end\nend".b,
  TOPLEVEL_BINDING, "/generated/binary.rb", 1)
Names.new.send("\xFF\xFEa".b)

# --- Depth ------------------------------------------------------------------

class Recursion
  def down(n)
    if n > 1
      down(n - 1)
    else
      Points.at("recursion"); i = 0; i += 1 while i < $spin; Points.done
    end
  end

  def odd(n)
    n.zero? ? down(1) : [n].each { |m| even(m - 1) }
  end

  def even(n)
    n.zero? ? down(1) : odd(n - 1)
  end
end

Recursion.new.down(5_000)
Recursion.new.even(200)

# --- Time without a call ----------------------------------------------------

# Machine code notes down where it is only when it calls something, and so not
# in these loops. They go round faster than those that look up `$spin`.
class Callless
  ROUNDS = 6

  def below
    rounds = $spin * ROUNDS
    Points.at("below a call", below: 2)

    i = 0; i += 1 while i < rounds; Points.done
  end

  def caller
    rounds = $spin * ROUNDS
    Points.at("after another way through", inside: LEAF); leaf(false, rounds)
  end

  def leaf(early, rounds)
    return Points.now if early

    i = 0; i += 1 while i < rounds; Points.done
  end
  label = RUBY_VERSION >= "3.4" ? "Callless#leaf" : "leaf"
  LEAF = [label, "leaf", __FILE__, __LINE__ - 3].freeze
end

2.times do |round|
  callless = Callless.new
  through = lambda do
    callless.below
    callless.leaf(true, 1)
    callless.caller
  end
  round.zero? ? Points.rehearse(&through) : through.call
end

# --- Files ------------------------------------------------------------------

require_relative "frames/required"
load File.join(__dir__, "frames/loaded.rb")
load File.join(__dir__, "frames/loaded.rb"), true

# --- Threads, fibers, handlers ----------------------------------------------

class Bodies
  def in_thread
    Thread.new { body("Thread") }.join
  end

  def in_fiber
    Fiber.new { Fiber.new { body("Fiber") }.resume }.resume
    Enumerator.new { |y| body("Enumerator"); y << 1 }.next
  end

  def in_handler
    before = trap("USR1") { body("trap") }
    Process.kill("USR1", Process.pid)
    trap("USR1", before || "DEFAULT")
  end

  def in_trace_point
    trace = TracePoint.new(:call) do |point|
      trace.disable
      Points.at("TracePoint"); i = 0; i += 1 while i < $spin; Points.done
    end
    trace.enable
    body("traced")
  end

  def body(name)
    Points.at(name); i = 0; i += 1 while i < $spin; Points.done
  end
end

bodies = Bodies.new
bodies.in_thread
bodies.in_fiber
bodies.in_handler
bodies.in_trace_point
Thread.new(bodies) { |it| Thread.new { it.body("Thread in Thread") }.join }.join
