# frozen_string_literal: true

# A small shop's back office, running until it is killed: one thread takes in
# orders, another writes reports. It is here to be profiled, so the work is of
# several kinds and of distinct weights, most of it in Ruby, some in C methods.
# Runs on every Ruby since 2.5, with nothing but the standard library.

require "digest"
require "json"

Item = Struct.new(:sku, :name, :cents, :stock)
Line = Struct.new(:sku, :quantity)

class Catalogue
  NAMES = %w[lantern teapot compass anvil ladder kettle violin barrel].freeze

  def initialize(size)
    @items = Array.new(size) do |n|
      sku = format("SKU-%05d", n)
      Item.new(sku, "#{NAMES[n % NAMES.size]} no. #{n}", 100 + (n * 37) % 4_900, 1_000)
    end
    @by_sku = @items.map { |item| [item.sku, item] }.to_h
  end

  attr_reader :items

  def find(sku)
    @by_sku.fetch(sku)
  end
end

# Text with one order line a line, as a till would send it.
class OrderFeed
  def initialize(catalogue, seed)
    @skus = catalogue.items.map(&:sku)
    @random = Random.new(seed)
  end

  def next_batch(lines)
    Array.new(lines) do
      "#{@skus[@random.rand(@skus.size)]};#{1 + @random.rand(9)};till-#{@random.rand(4)}"
    end.join("\n")
  end
end

module OrderParser
  def self.parse(text)
    text.each_line.map { |line| parse_line(line) }
  end

  def self.parse_line(line)
    sku, quantity, _till = line.chomp.split(";")
    Line.new(sku, Integer(quantity))
  end
end

class Pricing
  DISCOUNTS = { 3 => 2, 5 => 5, 8 => 9 }.freeze

  def initialize(catalogue)
    @catalogue = catalogue
  end

  def total(lines)
    lines.sum { |line| price(line) }
  end

  def price(line)
    full = @catalogue.find(line.sku).cents * line.quantity
    full - full * discount(line.quantity) / 100 + tax(full)
  end

  private

  def discount(quantity)
    percent = 0
    DISCOUNTS.each { |least, value| percent = value if quantity >= least }
    percent
  end

  # Rounds a tax of 19% to the even cent, one digit at a time.
  def tax(cents)
    rest = cents * 19
    tax = 0
    while rest >= 100
      step = rest > 10_000 ? 100 : 1
      tax += step
      rest -= step * 100
    end
    rest > 50 || (rest == 50 && tax.odd?) ? tax + 1 : tax
  end
end

class Inventory
  def initialize(catalogue)
    @catalogue = catalogue
  end

  def reserve(lines)
    lines.each do |line|
      item = @catalogue.find(line.sku)
      restock(item) if item.stock < line.quantity
      item.stock -= line.quantity
    end
  end

  def restock(item)
    item.stock += 1_000
  end
end

# A log that nobody can change unnoticed: each entry's digest covers the last.
class Ledger
  def initialize
    @head = "0" * 64
    @lock = Mutex.new
  end

  attr_reader :head

  def append(text)
    @lock.synchronize { @head = Digest::SHA256.hexdigest(@head + text) }
  end
end

class Report
  def initialize(catalogue)
    @catalogue = catalogue
  end

  def render
    rows = ranked.first(200).map { |item| row(item) }
    heading + rows.join("\n")
  end

  def to_json_text
    JSON.generate(ranked.first(100).map { |item| { "sku" => item.sku, "name" => item.name, "stock" => item.stock } })
  end

  private

  def ranked
    @catalogue.items.sort_by { |item| [-item.stock * item.cents, item.name] }
  end

  def heading
    "#{'item'.ljust(24)}#{'stock'.rjust(8)}#{'value'.rjust(14)}\n"
  end

  def row(item)
    item.name.ljust(24) + item.stock.to_s.rjust(8) + money(item.stock * item.cents).rjust(14)
  end

  def money(cents)
    whole = (cents / 100).to_s.gsub(/(\d)(?=(\d{3})+\z)/, '\1,')
    format("%s.%02d", whole, cents % 100)
  end
end

class BackOffice
  def initialize
    @catalogue = Catalogue.new(500)
    @ledger = Ledger.new
  end

  def start
    [thread("orders") { take_orders }, thread("reports") { write_reports }]
  end

  private

  def thread(name, &work)
    Thread.new do
      Thread.current.name = name
      loop(&work)
    end
  end

  def take_orders
    text = (@feed ||= OrderFeed.new(@catalogue, 7)).next_batch(200)
    lines = OrderParser.parse(text)
    total = Pricing.new(@catalogue).total(lines)
    Inventory.new(@catalogue).reserve(lines)
    @ledger.append("#{total}\n#{text}")
  end

  def write_reports
    report = Report.new(@catalogue)
    @ledger.append(report.render)
    @ledger.append(JSON.parse(report.to_json_text).map { |row| row["sku"] }.join)
  end
end

threads = BackOffice.new.start
$stdout.puts("ready")
$stdout.flush
threads.each(&:join)
