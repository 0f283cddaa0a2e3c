# frozen_string_literal: true

Points.at("required"); i = 0; i += 1 while i < $spin; Points.done

module RequiredFile
  def self.block
    [1].each { Points.at("method of a required file"); i = 0; i += 1 while i < $spin; Points.done }
  end
  block
end
