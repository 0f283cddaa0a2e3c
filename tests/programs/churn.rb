# Defines a class, runs its method, forgets it, and collects garbage, so that
# everything a name is read from is freed and used again. The process's title
# says which class it is at: nothing in the memory that is profiled.
puts "ready"
number = 0
loop do
  number += 1
  Process.setproctitle("at #{number}.")
  name = "C#{number}"
  eval "class #{name}
    def self.s#{number}; yield; end
    def m#{number}(n); n.times { n.hash }; self.class.s#{number} { n.times { n.hash } }; end
  end", TOPLEVEL_BINDING, "gen#{number}.rb", number
  Object.const_get(name).new.send("m#{number}", 2000)
  Object.send(:remove_const, name)
  if number % 5 == 0
    number % 10 == 0 && GC.respond_to?(:compact) ? GC.compact : GC.start
  end
end
