# A stack of known shape, seen through every kind of frame that Ruby labels in
# a way of its own. `wait` ends it; the thread below prints what Ruby itself
# says about the stack each time it is asked.
module Outer
  class Inner
    def initialize(&block); block.call; end
    def plain; [1].each { [2].map { |_| yield } }; end
    def self.of_class; new { yield }; end
    class << self
      def of_singleton; tap { yield }; end
    end
  end
  module Mixin
    def mixed_in; yield; end
  end
  module Before
    def plain; super { yield }; end
  end
  module Functions
    module_function def function; 1.times { yield }; end
  end
  class Child < Inner
    include Mixin
    prepend Before
    def initialize; nil; end
    alias renamed mixed_in
    define_method(:defined) { |&block| [1].select { block.call } }
    def method_missing(name, *); name == :missing ? yield : super; end
    def respond_to_missing?(*); true; end
    def größe; yield; end
    class_eval "def caf\xE9; yield; end".dup.force_encoding("ISO-8859-1"), "latin.rb", 5
    class_eval "def self.evaluated; yield; end", "evaluated.rb", 7
  end
end

module Refined
  refine Integer do
    def refined; yield; end
  end
end
using Refined

def in_rescue
  raise "once"
rescue
  yield
end

def in_ensure
  return 1
ensure
  yield
end

def in_eval
  eval "[3].each do
    yield
  end"
end

def wait
  $ready << true
  sleep
end

$ready = Queue.new
anonymous = Class.new { def of_anonymous; yield; end }
late = Class.new { def named_late; yield; end }
Late = late
object = Object.new
def object.of_object; yield; end
child = Outer::Child.new
puts "ready"

Thread.new do
  $ready.pop
  sleep 0.01 until Thread.main.stop?
  while STDIN.gets
    Thread.main.backtrace_locations.each do |location|
      file = location.absolute_path || location.path
      puts [location.label, location.base_label, file, location.lineno].map { |part| part.to_s.dump }.join("\t")
    end
    puts
  end
end

File.write($loaded = "/tmp/rbprof-shape-#{$$}.rb", "class Loaded\n  $continue.call\nend\n")
$continue = lambda do
  Outer::Inner.new { Outer::Inner.allocate.plain { Outer::Inner.of_class {
    Outer::Inner.of_singleton { Outer::Functions.function { child.mixed_in { child.renamed {
      child.plain { child.defined { child.missing { child.größe { child.send("caf\xE9".dup.force_encoding("ISO-8859-1")) {
        Outer::Child.evaluated { 5.refined { anonymous.new.of_anonymous { Late.new.named_late {
          object.of_object { in_rescue { in_ensure { in_eval {
            [4].each_with_index { {a: 1}.each { Late.instance_eval { wait } } }
          } } } }
        } } } }
      } } } } }
    } } } }
  } } }
end
begin
  load $loaded
ensure
  File.delete($loaded)
end
