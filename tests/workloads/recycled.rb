# frozen_string_literal: true

# Defines methods, runs each for a moment, and throws them away, so that Ruby
# gives the memory of one method's code to the next. Method m_N stands in file
# /generated/gen_N.rb from line N on. What is printed:
#
#     ran N BEGIN END        (CLOCK_MONOTONIC, nanoseconds)

require_relative "points"

SPIN = $spin * 3_000_000 / Points::SPIN_NS
DURATION = Integer(ENV.fetch("RUN_MS")) * 1_000_000

# How a method is thrown away differs, so that more than one kind of object is
# given to another use.
class Recycler
  def initialize
    @n = 100
    @log = []
  end

  def ran(n)
    before = Points.now
    yield
    @log << "ran\t#{n}\t#{before}\t#{Points.now}\n"
  end

  def body(n)
    "\ndef m_#{n}\n\n  i = 0\n  i += 1 while i < SPIN\nend\n"
  end

  # Redefined in one class.
  def same_class(n)
    Recycled.class_eval(body(n), "/generated/gen_#{n}.rb", n)
    object = Recycled.new
    ran(n) { object.public_send(:"m_#{n}") }
    Recycled.send(:remove_method, :"m_#{n}")
  end

  # In a class of its own, which goes too.
  def class_of_its_own(n)
    Object.const_set(:"C_#{n}", Class.new)
    klass = Object.const_get(:"C_#{n}")
    klass.class_eval(body(n), "/generated/gen_#{n}.rb", n)
    object = klass.new
    ran(n) { object.public_send(:"m_#{n}") }
    Object.send(:remove_const, :"C_#{n}")
  end

  # Of one object.
  def singleton(n)
    object = Object.new
    object.instance_eval(body(n), "/generated/gen_#{n}.rb", n)
    ran(n) { object.public_send(:"m_#{n}") }
  end

  KINDS = %i[same_class class_of_its_own singleton].freeze

  def run
    finish = Points.now + DURATION
    kinds = KINDS.cycle
    while Points.now < finish
      n = @n += 1
      send(kinds.next, n)
      clean(n)
    end
    @log.each { |line| $stdout.write(line) }
  end

  def clean(n)
    GC.start if (n % 2).zero?
    GC.compact if (n % 16).zero? && GC.respond_to?(:compact)
  rescue NotImplementedError
    nil
  end
end

class Recycled; end

Points.ready
Recycler.new.run
Points.finished
